"""What leaves the device, and when (thesis 4)."""
