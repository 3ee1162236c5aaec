"""Checks the states that a user's own function chooses for groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.parallel import GroupChoice, ParameterGroup


def in_order(given: Any, groups: Sequence[ParameterGroup]) -> tuple[GroupChoice, ...]:
    """Return what `choices` returned, in the order of the groups.

    Raises:
        ParameterError: it is not one choice for each group.
    """
    asked = "return one GroupChoice(group, on_host, keep) for each group"
    if not isinstance(given, Iterable):
        raise ParameterError(f"choices returned {given!r}: {asked}.")
    found: dict[int, GroupChoice] = {}
    numbers = {g.group for g in groups}
    for choice in given:
        if not isinstance(choice, GroupChoice):
            raise ParameterError(f"choices returned {choice!r} for a group: {asked}.")
        if choice.group not in numbers:
            raise ParameterError(f"choices returned a choice for group {choice.group!r}, which is none: {asked}.")
        if choice.group in found:
            raise ParameterError(f"choices returned two choices for group {choice.group}: {asked}.")
        found[choice.group] = choice
    for group in groups:
        if group.group not in found:
            name = group.modules[0] or "the model itself"
            raise ParameterError(f"choices returned no choice for group {group.group} ({name}): {asked}.")
    return tuple(found[g.group] for g in groups)
