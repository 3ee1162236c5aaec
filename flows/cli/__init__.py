"""Runs the console command `stowage`.

- `commands.py`: the table of commands.
- `main.py`: the program.
"""
