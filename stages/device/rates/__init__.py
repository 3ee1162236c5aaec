"""Rates of what is behind the device: disk and host memory."""
