"""Tells kinds of device budgets apart: a size, a share of plain PyTorch's peak, what is free, or one to search for."""

from __future__ import annotations

from typing import Literal

from stowage.stages.ir.errors import ParameterError
from stowage.stages.settings.sizes import parse_bytes, parse_percentage

AUTO, SMALLEST = "auto", "smallest"

BudgetKind = Literal["size", "share", "auto", "smallest", "slowdown"]
"""Kind of a budget; `slowdown` is `+5%`: the least memory with which a step takes at most 5% longer than keep-all."""


def kind_of_budget(budget: str | int) -> BudgetKind:
    """Return the kind of a budget; anything that is none of the others counts as a size, valid or not."""
    text = budget.strip() if isinstance(budget, str) else ""
    if text == AUTO:
        return "auto"
    if text == SMALLEST:
        return "smallest"
    if text.endswith("%"):
        return "slowdown" if text.startswith("+") else "share"
    return "size"


def parse_slowdown(text: str, key: str = "device_budget") -> float:
    """Return the fraction that `+5%` stands for; `+0%` is as fast as with everything kept.

    Args:
        text: the budget as written.
        key: its name in messages.

    Raises:
        ParameterError: it is not a slowdown.
    """
    digits = text.strip().removeprefix("+")
    if digits.rstrip("% 0.") == "" and any(c == "0" for c in digits) and digits.count("%") == 1:
        return 0.0
    try:
        return parse_percentage(digits, key)
    except ParameterError:
        raise ParameterError(
            f"{key} is {text!r}, which is not a slowdown: write '+5%' for the least memory with which a step takes at "
            "most 5% longer."
        ) from None


def check_budget(budget: str | int, key: str = "device_budget") -> BudgetKind:
    """Return the kind of a budget, if it is well written.

    Args:
        budget: the budget as written.
        key: its name in messages.

    Raises:
        ParameterError: it is not; the sentence says what to write.
    """
    kind = kind_of_budget(budget)
    if kind == "share":
        parse_percentage(str(budget), key)
    elif kind == "slowdown":
        parse_slowdown(str(budget), key)
    elif kind == "size":
        if isinstance(budget, str) and not any(c.isdecimal() for c in budget):
            raise ParameterError(
                f"{key} is {ascii(budget)[:60]}, which is not a budget: write '900MiB', '1.5GiB', '12GB', bytes, "
                "'50%', 'auto', 'smallest' or '+5%'."
            )
        parse_bytes(budget, key)
    return kind
