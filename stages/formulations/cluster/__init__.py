"""Schedules of an H-Graph: a large block as a graph of clusters (thesis 3)."""
