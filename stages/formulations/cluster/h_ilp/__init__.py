"""H-ILP (thesis 3.2)."""
