"""Retention intervals of an H-Graph, on CP-SAT."""
