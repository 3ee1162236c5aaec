"""What an iteration takes: memory and time."""
