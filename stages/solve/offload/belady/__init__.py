"""Plans by a sweep: `sweep.py` decides what leaves, `rows.py` writes the plan, `late_updates.py` serves the CPU."""
