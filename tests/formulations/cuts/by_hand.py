"""Steps of a few nodes, written down one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.ir.graph import ComputeNode


def node(
    number: int, reads: Sequence[int], creates: Sequence[int], time_s: float = 1.0, workspace_bytes: int = 0
) -> ComputeNode:
    """A node that does nothing special."""
    return ComputeNode(
        node=number,
        calls=(),
        reads=tuple(reads),
        creates=tuple(creates),
        mutates=(),
        phase="forward",
        block=-1,
        once=False,
        random=False,
        time_s=time_s,
        workspace_bytes=workspace_bytes,
        estimated=False,
        name=f"node {number}",
    )


def step(nodes: Sequence[ComputeNode], nbytes: Sequence[int], stays: Collection[int] = ()) -> StepGraph:
    """A step of such nodes."""
    return StepGraph(nodes, nbytes, base_bytes=0, waiting=frozenset(), stays=frozenset(stays), once=frozenset())
