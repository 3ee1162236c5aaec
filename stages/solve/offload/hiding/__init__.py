"""Copies hidden behind computing."""
