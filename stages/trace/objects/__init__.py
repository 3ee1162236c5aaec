"""The user's objects while a step is traced: kept as they were, and read."""
