"""O-ILP (thesis 4)."""
