"""How much work a function does, in numbers that do not depend on the machine or on what else it does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_in(work: Callable[[], Any]) -> int:
    """Functions called in Python and in C."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
