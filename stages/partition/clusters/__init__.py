"""H-Partition: the recursive partition of a large block (thesis 3.2.1)."""
