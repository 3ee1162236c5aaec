"""What was done by hand to break the pipeline and its files, at random: `make torture`."""
