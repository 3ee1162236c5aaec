"""From O-ILP's fractions to whole tensors (thesis 4.6)."""
