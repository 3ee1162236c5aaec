"""Reads sizes as people write them (`900MiB`, `1.5GiB`, `12GB`, an integer of bytes) and budgets (`50%`)."""

from __future__ import annotations

import re
from decimal import Decimal

from stowage.stages.ir.errors import ParameterError

_SIZE = re.compile(r"\s*(?P<number>\d{1,30}|\d{0,20}\.\d{1,20}|\d{1,20}\.)\s*(?P<unit>[a-zA-Z]*)\s*", re.ASCII)
_PREFIXES = ("k", "m", "g", "t", "p")
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}{b}": 1000**i for i, prefix in enumerate(_PREFIXES, 1) for b in ("", "b")}
_UNITS |= {f"{prefix}i{b}": 1024**i for i, prefix in enumerate(_PREFIXES, 1) for b in ("", "b")}
_PERCENTAGE = re.compile(r"\s*(\d{1,6}|\d{0,6}\.\d{1,20}|\d{1,6}\.)\s*%\s*", re.ASCII)
MOST_BYTES = 1 << 56
"""64 PiB: more than any device or disk of one machine has."""
_EXAMPLES = "'900MiB', '1.5GiB', '12GB' or a whole number of bytes"


def parse_bytes(size: str | int, key: str = "size") -> int:
    """Return the bytes of a size.

    Args:
        size: `900MiB` (1024-based), `12GB` (1000-based), or a whole number of bytes.
        key: its name in messages.

    Raises:
        ParameterError: it is not a size, or not positive.
    """
    nbytes = _bytes_of(size)
    if nbytes is None:
        raise ParameterError(f"{key} is {_shown(size)}, which is not a size: write {_EXAMPLES}.")
    if nbytes <= 0:
        raise ParameterError(f"{key} is {_shown(size)}, which is not above zero: write {_EXAMPLES}.")
    if nbytes > MOST_BYTES:
        raise ParameterError(f"{key} is {_shown(size)}, more than any machine has: write {_EXAMPLES}.")
    return nbytes


def _bytes_of(size: object) -> int | None:
    """Return the bytes that the whole text stands for; a fraction of a byte is left out."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(found["unit"].lower()) if found else None
    if found is None or unit is None or (unit == 1 and not found["number"].isdecimal()):
        return None
    return int(Decimal(found["number"]) * unit)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_percentage(text: str, key: str = "budget") -> float:
    """Return the fraction that `50%` stands for.

    Args:
        text: the percentage as written.
        key: its name in messages.

    Raises:
        ParameterError: it is not a percentage above 0%.
    """
    found = _PERCENTAGE.fullmatch(text)
    fraction = float(found[1]) / 100 if found else 0.0
    if fraction <= 0:
        raise ParameterError(
            f"{key} is {_shown(text)}, which is not a percentage above zero and below a million: write '50%'."
        )
    return fraction


def resolve_budget(budget: str | int, whole_bytes: int, key: str = "solve.device_budget") -> int:
    """Return the bytes of a budget.

    Args:
        budget: a size, or a percentage of `whole_bytes`.
        whole_bytes: the predicted total peak of plain PyTorch.
        key: the budget's name in messages.

    Raises:
        ParameterError: it is neither a size nor a percentage.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return max(1, min(MOST_BYTES, int(parse_percentage(budget, key) * whole_bytes)))
    return parse_bytes(budget, key)
