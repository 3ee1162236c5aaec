"""OffMate: O-ILP, rounding, the referee, in turns (thesis 4)."""
