"""Says what a plan does with every forward result, read from its rows.

A forward result is a storage that a forward node creates. If some backward node reads it, it is an activation, and it
is *kept* when its node runs once, so that it stays in memory until backward has used it, or *recomputed* when its
node runs again. If only forward reads it, it is *dropped*: freed before backward, and needed no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.trace import Storage
from stowage.stages.report.modules import Modules, module_of_block

Fate = Literal["kept", "recomputed", "dropped"]
FATES: tuple[Fate, ...] = ("kept", "recomputed", "dropped")
MEANING: dict[Fate, str] = {
    "kept": "computed once; in memory from forward until its last use in backward",
    "recomputed": "freed, and computed again when backward needs it",
    "dropped": "only forward reads it; freed before backward and needed no more",
}


@dataclass(frozen=True)
class Result:
    """One forward result."""

    storage: int
    name: str
    nbytes: int
    node: str
    block: int
    fate: Fate
    module: str = ""


@dataclass(frozen=True)
class BlockFates:
    """Forward results and times of one block; `block` is `SHARED` for what is outside the chain.

    Attributes:
        module: the module of the model that the block is.
        steps: what the plan runs of it, in order: `F3 fast`, `B3`.
        forward_s, recompute_s, backward_s: predicted seconds in one iteration; backward includes updates.
    """

    block: int
    label: str
    block_hash: str
    results: tuple[Result, ...]
    steps: tuple[str, ...]
    forward_s: float
    recompute_s: float
    backward_s: float
    module: str = ""

    def nbytes(self, fate: Fate) -> int:
        """Return the bytes of the results with this fate."""
        return sum(r.nbytes for r in self.results if r.fate == fate)


@dataclass(frozen=True)
class Treatment:
    """Blocks that are identical and treated alike; `blocks[0]` stands for all."""

    blocks: tuple[BlockFates, ...]

    @property
    def numbers(self) -> list[int]:
        """Return the blocks' positions in the chain."""
        return [b.block for b in self.blocks]


def forward_results(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    rows: Sequence[PlanRow],
    modules: Modules = MappingProxyType({}),
) -> list[Result]:
    """Return every forward result, in order of creation."""
    storage_of = {s.storage: s for s in storages}
    runs = Counter(row.node for row in rows if row.action == "compute")
    in_backward = {storage for node in nodes if node.phase != "forward" for storage in node.reads}
    found = []
    for node in nodes:
        if node.phase != "forward":
            continue
        for storage in node.creates:
            fate: Fate = "dropped"
            if storage in in_backward:
                fate = "recomputed" if runs[node.node] > 1 else "kept"
            where, of = storage_of[storage], modules.get(node.node, "")
            found.append(Result(storage, where.name, where.nbytes, node.name, node.block, fate, of))
    return found


def block_fates(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    rows: Sequence[PlanRow],
    modules: Modules = MappingProxyType({}),
) -> list[BlockFates]:
    """Return forward results and times by block, in the order of the chain; what is outside it comes first."""
    by_block: dict[int, list[Result]] = {b.block: [] for b in blocks}
    for result in forward_results(storages, nodes, rows, modules):
        by_block.setdefault(result.block, []).append(result)
    phases = {n.node: n.phase for n in nodes}
    block_of = {n.node: n.block for n in nodes}
    times: Counter[tuple[int, str]] = Counter()
    steps: dict[int, dict[str, None]] = {}
    for row in rows:
        if row.action != "compute":
            continue
        kind = "recompute" if row.recompute else "forward" if phases[row.node] == "forward" else "backward"
        times[block_of[row.node], kind] += row.end_s - row.start_s  # type: ignore[assignment]
        steps.setdefault(block_of[row.node], {})[row.step] = None
    known = {b.block: b for b in blocks}
    by_number = {n.node: n for n in nodes}
    return [
        BlockFates(
            block=k,
            label=known[k].label if k in known else "outside the chain, shared by blocks",
            block_hash=known[k].block_hash if k in known else "",
            results=tuple(by_block[k]),
            steps=tuple(steps.get(k, {})),
            forward_s=times[k, "forward"],
            recompute_s=times[k, "recompute"],
            backward_s=times[k, "backward"],
            module=module_of_block(known[k], by_number, modules) if k in known else "",
        )
        for k in sorted(by_block)
        if k != SHARED or by_block[k]
    ]


def treatments(fates: Sequence[BlockFates]) -> list[Treatment]:
    """Group identical blocks (equal hashes) whose results have the same fates, in order of first appearance."""
    groups: dict[tuple[object, ...], list[BlockFates]] = {}
    for block in fates:
        content = tuple((r.nbytes, r.fate) for r in block.results)
        groups.setdefault((block.block_hash or block.block, content), []).append(block)
    return [Treatment(tuple(group)) for group in groups.values()]


def totals(fates: Sequence[BlockFates]) -> Mapping[Fate, int]:
    """Return the bytes of each fate over all blocks."""
    return {fate: sum(b.nbytes(fate) for b in fates) for fate in FATES}
