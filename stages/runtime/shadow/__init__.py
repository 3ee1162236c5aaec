"""The user's own forward in plain PyTorch, beside a plan."""
