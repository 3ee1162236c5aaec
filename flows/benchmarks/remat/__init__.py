"""Rematerialization, measured beside what others do."""
