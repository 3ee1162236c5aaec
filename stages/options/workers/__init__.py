"""Processes that solve tasks."""
