"""What became of a plan: for people's CI."""
