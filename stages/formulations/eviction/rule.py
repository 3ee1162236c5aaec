"""Says which value greedy eviction drops first: the one with the lowest score.

DTR scores h = cost / (bytes · staleness). Where it takes how long ago a value was used, here it is known when it will
be used next:

    score = (seconds to make it again)^a / (bytes^b · (distance to its next use)^c)

No exponents are best for all models, so several are tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Exponents of the score; that of the cost is 1.

    Attributes:
        nbytes: exponent of the bytes.
        distance: exponent of the distance to the next use.
        in_seconds: the distance is in seconds of computing, not in nodes.
    """

    nbytes: float
    distance: float
    in_seconds: bool = False


RULES = (
    Rule(0.5, 0.5, in_seconds=True),
    Rule(1.0, 0.0),
    Rule(1.0, 1.0, in_seconds=True),
    Rule(0.25, 1.0, in_seconds=True),
    Rule(0.5, 0.5),
    Rule(1.0, 0.5, in_seconds=True),
)
"""The rules, the one that is best most often first."""
