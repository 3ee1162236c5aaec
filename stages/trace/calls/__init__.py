"""Facts about calls and their arguments."""
