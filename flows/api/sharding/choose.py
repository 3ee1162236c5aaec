"""Chooses the state of each group of parameters: where its shards live, and whether its gathered weights are kept."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup


def choose(
    groups: Sequence[ParameterGroup], machine: ParallelMachine, device_budget_bytes: int, host_budget_bytes: int
) -> list[GroupChoice]:
    """Return a choice for each group, in their order."""
    return [GroupChoice(g.group, on_host=False, keep="" in g.modules) for g in groups]
