"""Models that are no chain, with a lower tier: O-ILP's options hold what H-ILP and TW-Remat find."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from stowage.stages.device.tiers import DiskTier
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.machine import Link
from stowage.stages.ir.variant import LONG_LIVED
from stowage.stages.options.generate import options_for_blocks
from stowage.stages.options.tasks import GridSize
from stowage.stages.partition import Limits, make_chains
from stowage.stages.partition.clusters.block import block_clusters
from stowage.stages.solve import LowerTier, Solved
from stowage.stages.solve.offload import sources
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.offload.with_lower_tier import (
    LOWER_TIER,
    actions,
    assert_equal_with_lower_tier,
    smallest_with_lower_tier,
    solve_with_lower_tier,
)
from tests.runtime.beside_eager import adamw
from tests.solve.prepared import Prepared, light_options
from tests.solve.synthetic_steps import costs_for
from tests.zoo import REMAT

GRID = GridSize(2, 2, cluster_peaks=2, cluster_saves=1, top_peaks=2, top_saves=1, greedy_levels=4)
SETTINGS = SolverSettings(time_limit_s=0.2)
SLOW = Link(2e7, 2e7, 3e7)
"""A link on which activations are cheaper to compute again."""


@cache
def chains(name: str) -> tuple[Prepared, Prepared]:
    """A step with its large block whole, solved by clusters and by TW-Remat alone; and cut around long_lived values."""
    model, batch, loss = REMAT[name]()
    trace = trace_step(model, batch, loss=loss, optimizer=adamw(model), label=name)
    made = make_chains(trace, costs_for(trace))
    plain, long_lived = made[""], made[LONG_LIVED]
    large = max(plain.blocks, key=lambda b: len(b.nodes))
    clusters = block_clusters(trace, plain.nodes, [large], Limits(top_size=12, size=8))
    solved = options_for_blocks(
        [BlockGraph.from_json(large.graph)], size=GRID, settings=SETTINGS, workers=1, clusters=clusters
    )[large.block_hash]
    fixed = ("keep_all", "recompute_all")
    own = [o for o in solved if o.formulation in (*fixed, "tw_remat") or o.formulation.startswith("h_")]
    others = [b for b in plain.blocks if b.block_hash != large.block_hash]
    whole = Prepared(trace, plain.nodes, plain.blocks, [*own, *light_options(others)])
    return whole, Prepared(trace, long_lived.nodes, long_lived.blocks, light_options(long_lived.blocks))


@pytest.mark.long
def test_schedules_of_large_blocks_are_options() -> None:
    prepared, _ = chains("transformer")
    assert len(prepared.blocks) > 1
    program = program_of(prepared.trace, prepared.nodes)
    offloader = Offloader(program, Chain(prepared.blocks, prepared.nodes, prepared.options), LOWER_TIER)
    offmate = ChainProblem(offloader, choices_of(offloader))
    number = max(range(len(prepared.blocks)), key=lambda b: len(prepared.blocks[b].nodes))
    known = offloader.chain.options[prepared.blocks[number].block_hash]
    offered = {known[c.option].formulation for c in offmate.choices[number]}
    assert "tw_remat" in offered
    assert any(f.startswith("h_") for f in offered), offered
    assert len(offmate.within(1 << 40).blocks[number].options) == len(offmate.choices[number])


def tight(prepared: Prepared, lower_tier: LowerTier) -> tuple[int, Solved]:
    """A small budget with its plan: near the smallest, rounding alone, without Belady's rule, may find none."""
    smallest = smallest_with_lower_tier(prepared, lower_tier)
    for fifths in (5, 6, 7):
        with suppress(Infeasible):
            return smallest * fifths // 5, solve_with_lower_tier(
                prepared, smallest * fifths // 5, lower_tier=lower_tier
            )
    raise AssertionError("no plan at 140% of the smallest budget")


@pytest.mark.parametrize("cut", some(["whole", "long_lived"], keep=[]))
def test_training_with_a_lower_tier_equals_eager(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O-ILP's own plans, which plans by Belady's rule beat on models this small."""
    monkeypatch.setattr(sources.RuleSource, "propose", lambda self, task: (p for p in ()))
    prepared = chains("transformer")[cut == "long_lived"]
    lower_tier = replace(LOWER_TIER, link=SLOW)
    budget, solved = tight(prepared, lower_tier)
    assert budget < sum(s.nbytes for s in prepared.trace.storages if s.role in ("parameter", "state"))
    assert solved.summary.method == "offmate"
    assert solved.summary.device_peak_bytes <= budget
    assert solved.summary.recomputed_bytes > 0
    assert actions(solved)["reload"] > 20
    tier = DiskTier(tmp_path)
    assert_equal_with_lower_tier(REMAT["transformer"], prepared, solved, tier, adamw, iterations=3)
    tier.close()
