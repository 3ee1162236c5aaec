"""`python -m stowage` does what the console command `stowage` does."""

from stowage.flows.cli.main import run

if __name__ == "__main__":
    run()
