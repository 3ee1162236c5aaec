"""RK-Checkmate (thesis 2.4)."""
