"""Schedules as integers, the way `ir.plan.Option` holds them: node k is k, freeing allocation i is −1 − i."""

from __future__ import annotations

from collections.abc import Iterable

from stowage.stages.ir.block import Action, BlockSchedule
from stowage.stages.ir.plan import Option


def encode(actions: Iterable[Action]) -> tuple[int, ...]:
    """Rows of one part as integers."""
    return tuple(a.index if a.kind == "compute" else -1 - a.index for a in actions)


def decode(codes: Iterable[int]) -> tuple[Action, ...]:
    """Inverse of `encode`."""
    return tuple(Action("compute", c) if c >= 0 else Action("free", -1 - c) for c in codes)


def schedule_of(option: Option) -> BlockSchedule:
    """The schedule that an option stands for."""
    return BlockSchedule(decode(option.forward), decode(option.backward))
