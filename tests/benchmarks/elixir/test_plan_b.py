"""Plans of sharded steps beside the choices for groups, which the same referee judges as plans."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from stowage.flows.benchmarks.elixir.engines import Configuration
from stowage.flows.benchmarks.elixir.group_plans import group_plans, lowered_plan
from stowage.flows.benchmarks.elixir.machines import DRIVER_BYTES, PCIE, SXM, ElixirMachine
from stowage.flows.benchmarks.elixir.models import MODELS, OPT_175B, Gpt2
from stowage.flows.benchmarks.elixir.plan_b import Case, case_of, planned, seconds_of
from stowage.flows.benchmarks.elixir.plan_cells import fastest
from stowage.flows.benchmarks.elixir.rank_time import rank_time, united
from stowage.flows.benchmarks.elixir.rows import EFFORT, sharding_problem
from stowage.flows.benchmarks.elixir.sharded_machine import sharded_machine
from stowage.flows.benchmarks.elixir.sharded_step import sharded_trace, step_times
from stowage.flows.planning.sharding import plan_groups
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.ir.plan import PlanRow
from tests.matrix import some
from tests.simulate.sharded_steps import node

SMALL = Gpt2("small", 512, 3, 4, vocabulary=2000)


def case(machine: ElixirMachine, ranks: int, stores: Path, spare: float = 1.0) -> tuple[Case, ShardingProblem]:
    """A small model, with a share of the device bytes that the choices need at most."""
    c = Configuration(machine, SMALL, ranks, 2)
    problem = sharding_problem(c)
    made = case_of(c, problem.machine, problem.device_budget, stores)
    budget = int(spare * made.program.peak_bytes(made.offloader.executions(made.chain.leanest_options)))
    return replace(made, budget=budget), replace(problem, device_budget=budget + DRIVER_BYTES)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_costs_sum_up_to_those_of_the_table_of_groups(ranks: int, tmp_path: Path) -> None:
    made, problem = case(SXM, ranks, tmp_path)
    groups, nodes = problem.groups, made.program.nodes
    sums = {p: sum(n.time_s for n in nodes if n.phase == p and not n.collective) for p in ("forward", "backward")}
    assert sums["forward"] == pytest.approx(sum(g.forward_s for g in groups), rel=1e-3)
    layers = sum(g.backward_s - g.forward_s for g in groups if not g.is_root)  # less what is computed again
    root = sum(g.backward_s for g in groups if g.is_root)
    assert sums["backward"] == pytest.approx(layers + root, rel=1e-3)
    updates = [n.time_s for n in nodes if n.phase == "update" and not n.collective]
    least_s = min(updates)  # no node takes less
    expected = SMALL.elements / problem.machine.device_updates_per_s
    assert expected <= sum(updates) <= expected + least_s * len(updates)
    on_cpu = sum(made.offloader.cpu_update_s(n) for n in nodes if n.phase == "update" and n.mutates)
    assert on_cpu == pytest.approx(SMALL.elements / problem.machine.host_updates_per_s, rel=0.02)


def test_collectives_take_what_the_simulator_of_groups_counts(tmp_path: Path) -> None:
    made, problem = case(SXM, 4, tmp_path)
    calls = made.costed.variants[0].trace.calls
    gathers = [n for n in made.program.nodes if n.collective and n.phase == "forward"]
    assert {calls[c].target for n in gathers for c in n.calls} <= COLLECTIVES
    machine = problem.machine
    for gather in gathers:
        whole = sum(made.program.nbytes[s] for s in gather.creates)
        assert gather.time_s == pytest.approx(machine.collective_s(whole), rel=0.01)


def test_states_are_twelve_bytes_an_element() -> None:
    trace = sharded_trace(SMALL, 2, 2)
    elements = sum(s.nbytes for s in trace.storages if s.role == "parameter") // 2
    states = sum(s.nbytes for s in trace.storages if s.role == "state")
    assert elements == pytest.approx(SMALL.elements / 2, rel=0.01)
    assert states == pytest.approx(12 * elements, rel=0.001)


@pytest.mark.parametrize(
    ("card", "ranks", "spare"),
    some(
        product(["SXM", "PCIe"], [1, 2, 4], [1.0, 0.75]),
        keep=[("SXM", 1, 0.75), ("SXM", 2, 1.0), ("PCIe", 4, 0.75)],
    ),
)
def test_a_plan_is_never_slower_than_any_choice_for_groups(card: str, ranks: int, spare: float, tmp_path: Path) -> None:
    machine = {"SXM": SXM, "PCIe": PCIE}[card]
    made, problem = case(machine, ranks, tmp_path, spare)
    choices = {c.name: c.choices for c in plan_groups(problem, EFFORT).contestants}
    found = planned(made)
    assert found is not None
    assert found.device_bytes <= made.budget
    groups = group_plans(made, choices)
    assert set(groups) == {*choices}
    groups_s = {name: plan and plan.time_s for name, plan in groups.items()}
    chosen, _ = fastest(found, groups)
    assert chosen is not None
    assert chosen.device_bytes <= made.budget
    exact_s = groups_s["exact"] or math.inf
    assert chosen.time_s <= exact_s
    for name, chosen in choices.items():
        assert exact_s <= (groups_s[name] or math.inf)
        lowered = lowered_plan(made, chosen, name)
        if made.referee.fits(lowered):
            assert groups[name] is not None, "one that is like another is shown too"
            assert exact_s <= seconds_of(made, lowered)
            # Nor is the plan alone slower than any of them, as the referee, which chose it, has their times.
            assert found.referee_s <= lowered.time_s * (1 + 1e-9), name
            assert found.referee_s <= lowered.time_s


def test_opt_175b_with_fewer_layers_is_planned_on_64_gpus(tmp_path: Path) -> None:
    distinct = []
    for layers in (3, 6):
        c = Configuration(SXM, replace(OPT_175B, layers=layers), 64, 4)
        problem = sharding_problem(c)
        made = case_of(c, problem.machine, problem.device_budget, tmp_path)
        made = replace(made, budget=made.costed.eager_peak_bytes // 2)
        found = planned(made)
        assert found is not None
        assert found.device_bytes <= made.budget
        assert found.referee_s >= found.bound_s > 0
        distinct.append(len({b.block_hash for b in made.costed.variants[0].blocks}))
    assert distinct[0] == distinct[1], "layers more are no blocks more to solve"


def test_what_is_on_the_host_leaves_the_device(tmp_path: Path) -> None:
    made, problem = case(SXM, 2, tmp_path)
    count = len(problem.groups)
    on_device = lowered_plan(made, [GroupChoice(i, on_host=False, keep=True) for i in range(count)], "device")
    reshard = lowered_plan(made, [GroupChoice(i, on_host=False, keep=i == 0) for i in range(count)], "reshard")
    host = lowered_plan(made, [GroupChoice(i, on_host=True, keep=i == 0) for i in range(count)], "host")
    assert reshard.peak_bytes < on_device.peak_bytes
    assert host.outcome.baseline_bytes < 0.05 * on_device.outcome.baseline_bytes
    assert {s.kind for s in host.steps} >= {"reload", "offload", "update", "gather"}
    weights = sum(made.program.nbytes[s] for s in made.offloader.movable if "::" not in made.program.storages[s].name)
    assert weights < host.outcome.reload_bytes <= 3 * weights


def test_computing_is_slower_beside_collectives() -> None:
    machine = replace(PCIE.with_ranks(4), collective_slowdown=0.5)
    nodes = [node(0, "gather", "forward", collective=True), node(1, "layer", "forward")]
    rows = [
        PlanRow(0, "gather", 0, 5, 0, "F0", False, 0.0, 2.0, 0, 0),
        PlanRow(1, "reload", -1, 6, -1, "F0", False, 1.0, 3.0, 0, 0),
        PlanRow(2, "compute", 1, -1, 0, "F0", False, 0.0, 4.0, 0, 0),
    ]
    assert rank_time(rows, nodes, 4.0, machine) == pytest.approx(5.0)
    assert united([(2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (float("nan"), 1.0)]) == [(0.0, 3.0)]


def test_rates_are_divided_by_the_ranks() -> None:
    machine = SXM.with_ranks(4)
    rank = sharded_machine(machine, 1e14, 1e12)
    assert rank.host.capacity_bytes == machine.host_bytes // 4
    assert rank.host.link.reload_bytes_per_s == machine.reload_bytes_per_s / 4
    assert not rank.host.link.carries_collectives
    assert sharded_machine(PCIE.with_ranks(4), 1e14, 1e12).host.link.carries_collectives
    assert rank.device.collective_bytes_per_s == machine.collective_bytes_per_s
    times = step_times(MODELS["GPT2-4b"], 8, 1e14, 1e12)
    assert times.of("backward") == 2 * (times.of("layers") + times.of("rest"))
