"""Hides copies behind computing: `shift.py` moves rows, `timeline.py` says what is late, `deadlines.py` orders
updates."""
