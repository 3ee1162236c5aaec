"""No plan that the referee accepts is faster than the bound by cuts with transfers, whoever made it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.formulations.cuts.transfers.below import Below
from stowage.stages.formulations.cuts.transfers.model import build_with_transfers
from stowage.stages.formulations.cuts.transfers.solve import solve_with_transfers
from stowage.stages.ir.errors import Infeasible, ParameterError
from stowage.stages.ir.machine import BehindHost, Link
from stowage.stages.ir.methods import METHODS
from stowage.stages.ir.plan import tier_state
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables
from stowage.stages.report.facts import bound_words
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import replay_plan
from stowage.stages.solve import LowerTier, PlanRequest, solve_plan
from stowage.stages.solve.cuts.transfers import TransferWay
from stowage.stages.solve.offload.cpu_updates import UpdatesOnCpu
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.variants import Variant, solve_variants
from stowage.stages.solver.milp import solve_milp
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import trace_step
from stowage.stages.trace.updates import MicroBatch
from tests.matrix import examples, some
from tests.solve.cuts.plan_as_answer import fix, mean_times
from tests.solve.cuts.random_transfers import RandomTransfers
from tests.solve.prepared import Prepared, prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps
from tests.zoo import ZOO

SAME = 1 + 1e-9
"""The same times may be added up in another order."""

ALONE = [m.name for m in METHODS if not m.offloads and not m.whole]


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(training_steps(max_layers=5), st.floats(0, 1), st.data())
def test_of_random_transfers(trace: TraceTables, share: float, data: st.DataObject) -> None:
    """At any chain of cuts, for links of any rate, with updates on the CPU and without, relaxed and of integers."""
    prepared = prepare_trace(trace)
    nodes = prepared.nodes
    rich = prepared.solve().summary
    budget = rich.smallest_feasible_bytes + int(share * (rich.device_peak_bytes - rich.smallest_feasible_bytes))
    try:
        plan = prepared.solve(budget, data.draw(st.sampled_from(ALONE)))
    except (Infeasible, ParameterError):
        return
    rate = 10 ** data.draw(st.floats(4.5, 8))
    link = Link(
        rate, rate * data.draw(st.sampled_from([0.5, 1.0, 2.0])), rate * data.draw(st.sampled_from([1, math.inf]))
    )
    updates = [n for n in nodes if n.phase == "update"]
    seconds = {n.node: data.draw(st.sampled_from([math.inf, 1e-7, 1e-6, 1e-5])) for n in updates}
    on_cpu = frozenset(u for u, s in seconds.items() if s < math.inf and data.draw(st.booleans()))
    step = StepGraph.of(trace, nodes)
    below = Below.of(trace, step, link, seconds)
    transfers = RandomTransfers(
        trace.storages,
        nodes,
        [Step.of(r) for r in plan.rows],
        data.draw(st.sampled_from([1.0, 0.8, 0.3])),
        data.draw(st.booleans()),
        on_cpu & below.cpu_update_s.keys(),
        random.Random(data.draw(st.integers(0, 1 << 20))),
    )
    steps, state = transfers.plan()
    tier = ReplayedTier(link, cpu_update_s=seconds)
    outcome = replay_plan(trace.storages, nodes, steps, keep=prepared.keep(), start=state, tier=tier)
    cuts: list[int] = []
    forward = [n.node for n in nodes if n.phase == "forward"]
    for node in sorted({*forward, *Choice(step).spine}):
        if (not cuts or step.precedes(cuts[-1], node)) and data.draw(st.booleans()):
            cuts.append(node)
    *times, period_s = mean_times(prepared.trace.storages, prepared.nodes, steps, state, tier, cuts)
    event("the second step is faster than the mean" if outcome.time_s < period_s / SAME else "steps are equal")
    model = build_with_transfers(step, cuts, outcome.peak_bytes, below)
    fix(model, steps, state, [*times, period_s])
    assert solve_milp(model.problem, SolverSettings(300.0)).status == "optimal", "the plan is no answer of the program"
    event(f"the CPU updates: {bool(transfers.on_cpu)}, on its way between steps: {bool(state.reloading)}")
    for integral in (False, True):
        found = solve_with_transfers(step, cuts, outcome.peak_bytes, below, SolverSettings(10.0), integral=integral)
        assert found.status != "infeasible"
        assert found.bound_s <= period_s * SAME
        once_s = sum(n.time_s for n in nodes if n.node not in below.cpu_update_s)
        event(f"{'integers' if integral else 'relaxed'}: above once" if found.bound_s > once_s * 1.001 else "once")
        if found.bound_s > 0.9 * period_s and found.bound_s > once_s * 1.01:
            event("within a tenth")


RATES = {"slow": 1.0, "fast": 6.0}
"""Links: what lasts, so many times in a step."""


def _tier(prepared: Prepared, link: str, cpu: float, disk: float) -> LowerTier:
    """A lower tier whose rates are shares of what lasts in a step's time; with a disk behind it for most of that."""
    whole = prepared.solve().summary
    rate = whole.baseline_bytes / whole.step_time_s
    both = Link(RATES[link] * rate, RATES[link] * rate, 1.5 * RATES[link] * rate)
    behind = BehindHost(Link(disk * rate, disk * rate), 1 << 40) if disk else None
    room = whole.baseline_bytes // 3 if disk else 1 << 40
    return LowerTier(both, room, smallest_bytes=16, cpu_update_bytes_per_s=cpu * rate, disk=behind)


def seconds_on_cpu(program: StepProgram, tier: LowerTier) -> dict[int, float]:
    """The seconds of each update by the CPU, as the referee counts."""
    updates = UpdatesOnCpu(program, tier)
    return {n.node: updates.seconds(n) for n in program.nodes if n.phase == "update"}


def _assert_bounded(prepared: Prepared, tier: LowerTier, shares: Sequence[float]) -> None:
    """No plan of any method that offloads is faster, and each is an answer of the program at those cuts."""
    most = prepared.solve().summary.device_peak_bytes
    limits = SolverSettings(1.0, 0.05)
    program = program_of(prepared.trace, prepared.nodes)
    behind = tier.disk.link if tier.disk is not None else None
    replayed = ReplayedTier(tier.link, behind, cpu_update_s=seconds_on_cpu(program, tier))
    step = StepGraph.of(prepared.trace, prepared.nodes)
    below = Below.of(prepared.trace, step, tier.link, replayed.cpu_update_s, disk=tier.disk is not None)
    variant = Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)
    moved = 0
    for share in shares:
        budget = int(share * most)
        way = TransferWay(variant, program, math.inf, budget, tier)
        for _ in way.improve(time.monotonic() + 2):
            pass
        for method in ("auto", *(m.name for m in METHODS if m.offloads)):
            request = PlanRequest(budget, method, slots=60, o_ilp_limits=limits, o_ilp_searches=1, lower_tier=tier)
            try:
                plan = solve_plan(prepared.trace, prepared.nodes, prepared.blocks, prepared.options, request)
            except (Infeasible, ParameterError):
                continue
            steps, state = [Step.of(r) for r in plan.rows], tier_state(plan.slots)
            assert way.bound_s <= plan.summary.step_time_s * SAME
            *times, period_s = mean_times(prepared.trace.storages, prepared.nodes, steps, state, replayed, way.cuts)
            assert way.bound_s <= period_s * SAME
            model = build_with_transfers(step, way.cuts, budget, below)
            fix(model, steps, state, [*times, period_s])
            assert solve_milp(model.problem, SolverSettings(300.0)).status == "optimal", "the plan is no answer"
            moved += plan.summary.reload_bytes
    assert moved


@pytest.mark.parametrize(
    ("name", "link", "cpu", "disk"),
    some(
        product(["gpt2", "resnet", "lstm", "transformer"], RATES, [0.0, 4.0], [0.0, 1.0]),
        keep=[("gpt2", "fast", 4.0, 0.0), ("resnet", "slow", 0.0, 1.0)],
    ),
)
def test_of_models(name: str, link: str, cpu: float, disk: float) -> None:
    """With a host alone and with a disk behind it, with updates on the CPU and without."""
    prepared = prepared_zoo(name)
    _assert_bounded(prepared, _tier(prepared, link, cpu, disk), (0.5, 0.7))


@pytest.mark.parametrize(
    ("first", "update", "clip"), some(product([True, False], repeat=3), keep=[(False, False, False)])
)
def test_of_micro_batches(first: bool, update: bool, clip: bool) -> None:
    """Gradients that wait are offloaded too: before, after, and while all of them are clipped together."""
    model, batch, loss = ZOO["gpt2"]()
    waiting = frozenset() if first else frozenset(n for n, _ in model.named_parameters())
    micro_batch = MicroBatch(waiting, update, 1.0 if clip else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = prepare_trace(trace_step(model, batch, loss=loss, optimizer=optimizer, micro_batch=micro_batch))
    _assert_bounded(prepared, replace(_tier(prepared, "slow", 4.0, 0.0), gradients=True), (0.6,))


def test_a_plan_states_what_no_other_beats_and_is_no_other_for_it() -> None:
    """More than computing alone and than the rates of the tiers say, here 2.8% more than either; in words too."""
    prepared = prepared_zoo("gpt2")
    tier = _tier(prepared, "slow", 0.0, 0.0)
    request = PlanRequest(448468, slots=100, lower_tier=tier, o_ilp_searches=1)
    variants = [Variant("plain", prepared.trace, prepared.nodes, prepared.blocks)]
    before = solve_variants(variants, prepared.options, request)
    after = solve_variants(variants, prepared.options, replace(request, cut_seconds=60.0))
    assert after.rows == before.rows
    s = after.summary
    assert max(s.lower_bound_s, s.rates_bound_s) * 1.02 < s.bound_s < s.step_time_s
    assert s.bound_kind == "cuts with transfers"
    assert s.bound_cuts
    assert s.gap == pytest.approx(1 - s.bound_s / s.step_time_s)
    assert "whatever it copies and wherever it updates" in bound_words(s)
    assert before.summary.bound_s == 0.0
