"""A step small enough to work out by hand, as storages and compute nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import Storage, StorageRole


def storage(number: int, nbytes: int, role: StorageRole = "temporary", name: str = "") -> Storage:
    """A storage; its name is its letter unless given."""
    return Storage(number, nbytes, role, name or f"s{number}")


def node(number: int, reads: Iterable[int], creates: Iterable[int], **more: Any) -> ComputeNode:
    """A compute node of one second in forward, unless `more` says otherwise."""
    plain = ComputeNode(
        node=number,
        calls=(),
        reads=tuple(reads),
        creates=tuple(creates),
        mutates=(),
        phase="forward",
        block=0,
        once=False,
        random=False,
        time_s=1.0,
        workspace_bytes=0,
        estimated=False,
        name=f"n{number}",
    )
    return replace(plain, **more)


WEIGHT, X, Y, LOSS, GRADIENT = range(5)
STORAGES = [
    storage(WEIGHT, 1000, "parameter", "weight"),
    storage(X, 10, name="x"),
    storage(Y, 20, name="y"),
    storage(LOSS, 1, name="loss"),
    storage(GRADIENT, 1000, name="gradient"),
]
NODES = [
    node(0, [WEIGHT], [X], time_s=1.0, workspace_bytes=7),
    node(1, [X], [Y], time_s=2.0),
    node(2, [Y], [LOSS], time_s=4.0),
    node(3, [X, Y], [GRADIENT], time_s=8.0, phase="backward"),
    node(4, [GRADIENT, WEIGHT], [], time_s=16.0, phase="update", mutates=(WEIGHT,), once=True, workspace_bytes=500),
]
KEEP = frozenset({LOSS})


def steps(text: str) -> list[Step]:
    """`0 1 -2 3`: compute nodes 0 and 1, free storage 2, compute node 3."""
    return [
        Step(-1, int(word[1:]), f"row {i}") if word.startswith("-") else Step(int(word), -1, f"row {i}")
        for i, word in enumerate(text.split())
    ]
