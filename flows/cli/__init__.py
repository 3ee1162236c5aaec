"""The console command `stowage`: `commands` (which there are) and `main` (the program)."""
