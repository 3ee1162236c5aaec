"""Greedy selective recomputation."""
