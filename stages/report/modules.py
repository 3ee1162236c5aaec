"""Finds the module of the model that a node, a block, or the peak of a plan belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.trace import Call

Modules = Mapping[int, str]
"""Node -> path of its module; the outermost module and the loss have none."""


def modules_of(nodes: Sequence[ComputeNode], calls: Sequence[Call]) -> dict[int, str]:
    """Return for each node the module of its last call that has one."""
    found = {}
    for node in nodes:
        named = [calls[call].module for call in node.calls if calls[call].module]
        if named:
            found[node.node] = named[-1]
    return found


def module_of_block(block: Block, nodes: Mapping[int, ComputeNode], modules: Modules) -> str:
    """Return the innermost module that has all of a block's forward operations: `transformer.h.3`.

    Where they have only the outermost in common, the first and the last module are named.
    """
    paths = [modules[n] for n in block.nodes if n in modules and nodes[n].phase == "forward"]
    if not paths:
        return ""
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(path.split(".") for path in paths)))
    common = [parts[0] for parts in shared]
    if common:
        return ".".join(common)
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} … {paths[-1]}"


def module_of_peak(rows: Sequence[PlanRow], nodes: Mapping[int, ComputeNode], modules: Modules) -> str:
    """Return module and pass where memory is highest: `transformer.h.11.mlp, backward`; empty without known modules."""
    if not rows or not modules:
        return ""
    peak = max(range(len(rows)), key=lambda k: (rows[k].peak_bytes, -k))
    # A copy belongs to the node that runs next.
    node = next((nodes[row.node] for row in rows[peak:] if row.action == "compute"), None)
    if node is None:
        return "the end of the step"
    return f"{modules.get(node.node) or 'the outermost module or the loss'}, {node.phase}"
