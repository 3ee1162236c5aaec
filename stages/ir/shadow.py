"""Facts about the plain forward, taken from its trace."""

from __future__ import annotations

from collections.abc import Iterable

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables


def forward_bytes(trace: TraceTables) -> int:
    """Return the bytes of everything that forward and loss make, if none of it were dropped."""
    made = {trace.values[v].storage for c in trace.calls if c.phase == "forward" for v in c.returns if v >= 0}
    return sum(trace.storages[s].nbytes for s in made if trace.storages[s].role == "temporary")


def forward_reads(trace: TraceTables) -> dict[str, frozenset[str]]:
    """Return the parameters that each module reads by itself, not in a submodule; "" stands for the loss too."""
    found: dict[str, set[str]] = {}
    for call in trace.calls:
        if call.phase != "forward":
            continue
        storages = [trace.storages[trace.values[v].storage] for v in call.reads]
        found.setdefault(call.module, set()).update(s.name for s in storages if s.role in ("parameter", "outside"))
    return {module: frozenset(names) for module, names in found.items() if names}


def workspaces(trace: TraceTables, nodes: Iterable[ComputeNode]) -> dict[str, int]:
    """Return the most workspace bytes of each operator of the forward."""
    found: dict[str, int] = {}
    for node in nodes:
        for call in node.calls if node.phase == "forward" else ():
            target = trace.calls[call].target
            found[target] = max(found.get(target, 0), node.workspace_bytes)
    return found
