"""The first ten minutes on a card."""
