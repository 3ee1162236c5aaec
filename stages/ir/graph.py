"""Tables that `partition` writes: compute nodes with costs, and the chain of blocks (thesis 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHARED = -1
"""Block number of compute nodes outside the chain, whose results are kept for the whole step."""


@dataclass(frozen=True)
class ComputeNode:
    """One or more calls that are always executed together (cNode).

    Attributes:
        node: position in a topological order that is also the order of first execution.
        calls: non-view calls in order; views are made where they are first needed.
        reads: storages that must be in memory, persistent ones included, its own outputs not.
        creates: temporary storages it fills.
        mutates: persistent storages it changes.
        phase: forward (loss included), backward, or update of a parameter.
        block: position of its block in the chain, or `SHARED`.
        once: may be executed only once.
        random: draws random numbers; executed again, it replays the state of its first execution.
        time_s: mean time of one execution, with the views that it is the first to read, seconds.
        workspace_bytes: peak bytes above inputs and `creates`.
        estimated: one of its costs is an estimate, not a measurement.
        name: for people.
        variant: the rewrite of the trace that it belongs to (see `rewrite`).
        takes: storages of summands, for a sum; it may be written over one that is freed right afterwards (`ir.sums`).
        collective: all ranks run it together, beside computing if the plan starts it early (`ir.collectives`).
        flagged_bytes: `workspace_bytes` by the flags of its calls (see `ir.flags`), where these were tried.
        copied_bytes: the part of `workspace_bytes` that is copies of weights which one update of all changes.
    """

    node: int
    calls: tuple[int, ...]
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    mutates: tuple[int, ...]
    phase: Literal["forward", "backward", "update"]
    block: int
    once: bool
    random: bool
    time_s: float
    workspace_bytes: int
    estimated: bool
    name: str
    variant: str = "plain"
    takes: tuple[int, ...] = ()
    collective: bool = False
    flagged_bytes: tuple[int, ...] = ()
    copied_bytes: int = 0


@dataclass(frozen=True)
class Block:
    """One block of the chain.

    Attributes:
        block: position, 0 first.
        block_hash: `BlockGraph.content_hash()`: identical blocks share it.
        graph: `BlockGraph.to_json()`.
        nodes: compute node of each `BlockGraph` node, by position.
        storages: storage of each `BlockGraph` allocation, by position.
        label: the module paths it spans, for people.
        resident_bytes: gradients of later blocks that are still in memory when this block's backward starts.
        consumed: storages of those gradients that this block's backward uses for the last time.
        variant: the rewrite of the trace that it belongs to.
    """

    block: int
    block_hash: str
    graph: str
    nodes: tuple[int, ...]
    storages: tuple[int, ...]
    label: str
    resident_bytes: int
    consumed: tuple[int, ...]
    variant: str = "plain"
