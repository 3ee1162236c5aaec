"""Runs the console command `stowage`: `python -m stowage`."""

from stowage.flows.cli.main import run

if __name__ == "__main__":
    run()
