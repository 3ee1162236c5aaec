"""Plan every exact rewrite of the trace and keep the fastest plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.select import Solved, lower_bound_s, solve_plan


@dataclass(frozen=True)
class Variant:
    """One way to compute the same numbers: its trace, compute nodes and blocks, and clusters of large blocks."""

    name: str
    trace: TraceTables
    nodes: Sequence[ComputeNode]
    blocks: Sequence[Block]
    clusters: Sequence[BlockCluster] = ()


def solve_variants(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest) -> Solved:
    """The fastest plan among all variants; the first variant, the trace as recorded, wins ties and states the bounds.

    Raises:
        Infeasible: no variant fits; the one that needs least is reported.
        TableError: options are missing.
    """
    found: list[Solved] = []
    failures: list[Infeasible] = []
    for variant in variants:
        hashes = {b.block_hash for b in variant.blocks}
        try:
            own = [o for o in options if o.block_hash in hashes]
            solved = solve_plan(variant.trace, variant.nodes, variant.blocks, own, request)
        except Infeasible as failure:
            failures.append(failure)
            continue
        found.append(replace(solved, summary=replace(solved.summary, variant=variant.name)))
        if solved.summary.recomputed_bytes == 0 and not solved.slots:
            break
    if not found:
        raise min(failures, key=lambda f: f.smallest_feasible_bytes)
    smallest = min([s.summary.smallest_feasible_bytes for s in found] + [f.smallest_feasible_bytes for f in failures])
    once_s = lower_bound_s(variants[0].nodes, request.below)
    best = min(found, key=lambda s: s.summary.step_time_s)
    summary = replace(
        best.summary,
        smallest_feasible_bytes=smallest,
        lower_bound_s=once_s,
        gap=max(0.0, 1 - once_s / best.summary.step_time_s),
    )
    return replace(best, summary=summary)
