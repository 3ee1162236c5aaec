"""What is claimed, measured."""
