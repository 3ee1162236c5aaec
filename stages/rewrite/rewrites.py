"""The table of rewrites of a trace: a new one is a function and a row of `REWRITES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.rewrite.masks import mask_draws, pack_masks

Where = Callable[[Call], bool]
"""Says whether the rewrite is to be made at a call of the trace as it was recorded."""


@dataclass(frozen=True)
class Rewrite:
    """One rewrite.

    Attributes:
        name: its name in variants and tables, and for people.
        apply: rewrites a trace at those of its sites at which the predicate holds; where there is none it returns the
            very trace that it was given, and is known by that not to apply.
        sites: the calls at which it can be made, each by itself, in order.
        exact: whether every number stays the same, bit for bit.
    """

    name: str
    apply: Callable[[TraceTables, Where], TraceTables]
    sites: Callable[[TraceTables], Sequence[int]]
    exact: bool = True

    def everywhere(self, trace: TraceTables) -> TraceTables:
        """Rewrite a trace at every site."""
        return self.apply(trace, lambda call: True)


REWRITES: dict[str, Rewrite] = {r.name: r for r in (Rewrite("packed", pack_masks, mask_draws),)}
"""Rewrites by name, in the order of preference between equally fast plans; `packed` stores dropout masks as bytes."""
