"""Lets Python look for cyclic garbage less often while plans are made.

Models of solvers are millions of small objects, none of them in a cycle. Looking through all of them again and again
takes a third of the time of planning, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (50_000, 20, 100)
"""Thresholds of the collector's three generations, in place of Python's (700, 10, 10)."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Run a block with higher thresholds, and set the old ones again; a collector that is off stays off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, RARELY))
    try:
        yield
    finally:
        gc.set_threshold(*before)
