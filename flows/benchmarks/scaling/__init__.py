"""How planning time grows."""
