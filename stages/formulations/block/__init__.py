"""Schedules of one block."""
