"""The tables of the papers, planned here."""
