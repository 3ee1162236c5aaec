"""What a step reads besides tensors, and how a recorded step follows it."""
