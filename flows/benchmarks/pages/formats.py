"""Writes numbers of a measurement for people."""

from __future__ import annotations

from stowage.stages.ir.errors import MIB


def mib(nbytes: int) -> str:
    """Write bytes as MiB."""
    return f"{nbytes / MIB:,.1f} MiB"


def seconds(value: float) -> str:
    """Write seconds with about two digits."""
    return f"{value:,.0f} s" if value >= 9.5 else f"{value:.2f} s"


def about_seconds(value: float) -> str:
    """Write seconds as people say them."""
    return f"{value:,.0f} s" if value >= 9.5 else f"{value:.1f} s"


def whole_seconds(value: float) -> str:
    """Write seconds without a fraction."""
    return f"{value:,.0f} s"


def milliseconds(value: float) -> str:
    """Write seconds as milliseconds."""
    return f"{value * 1e3:.1f} ms"


def ratio(value: float) -> str:
    """Write a ratio."""
    return f"{value:.2f}"


def percent(share: float) -> str:
    """Write a share in whole percent, with a minus that is as wide as digits."""
    return f"{round(share * 100)}%".replace("-", "−")


def tenths(share: float) -> str:
    """Write a share in tenths of a percent, with a minus that is as wide as digits."""
    return f"{share:.1%}".replace("-", "−")


def hundredths(share: float) -> str:
    """Return a share as percent with two digits."""
    return f"{share:.2%}"


def count(value: int) -> str:
    """Write a number of things."""
    return f"{value:,}"


def yes_or_no(value: bool) -> str:
    """Write a truth value as a word."""
    return "yes" if value else "**no**"
