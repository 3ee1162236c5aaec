"""The six planning stages in one process."""
