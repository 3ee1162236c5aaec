"""A program recorded on tensors without memory."""
