"""Converts schedules to integers, as `ir.plan.Option` keeps them: node k is k, freeing allocation i is −1 − i."""

from __future__ import annotations

from collections.abc import Iterable

from stowage.stages.ir.block import Action, BlockSchedule
from stowage.stages.ir.plan import Option


def encode(actions: Iterable[Action]) -> tuple[int, ...]:
    """Convert the actions of one part to integers."""
    return tuple(a.index if a.kind == "compute" else -1 - a.index for a in actions)


def decode(codes: Iterable[int]) -> tuple[Action, ...]:
    """Convert integers back to actions; the inverse of `encode`."""
    return tuple(Action("compute", c) if c >= 0 else Action("free", -1 - c) for c in codes)


def schedule_of(option: Option) -> BlockSchedule:
    """Return the schedule that an option encodes."""
    return BlockSchedule(decode(option.forward), decode(option.backward))
