"""A user's module with settings."""

WEIGHT = 0.5
SCALES = {"kl": 0.1, "unread": 1}
UNREAD = 7


def scaled(value: float) -> float:
    """Reads one of them."""
    return value * WEIGHT
