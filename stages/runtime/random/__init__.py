"""Random state: replayed, saved, left as it was."""
