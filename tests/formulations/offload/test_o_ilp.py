"""O-ILP: times by hand, brute force over options, what must be monotone, and every equation in the model."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stowage.stages.formulations.offload.bounds import lower_bound
from stowage.stages.formulations.offload.o_ilp.answers import OIlpAnswer
from stowage.stages.formulations.offload.o_ilp.equations import EQUATIONS, TRANSFER_COST, build
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp, smallest_budget
from stowage.stages.formulations.offload.problem import (
    OffloadBlock,
    OffloadMachine,
    OffloadOption,
    OffloadProblem,
    ParameterTensor,
    group_parameters,
)
from stowage.stages.ir.machine import Link
from stowage.stages.solver.equations import constraint_prefix
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings
from tests.formulations.offload.offload_problems import GIB, compute_s, llama, problems, rtx3060
from tests.matrix import examples
from tests.solver.doors import Door

EXACT = SolverSettings(time_limit_s=600.0)
ROUGH = SolverSettings(time_limit_s=600.0, gap=0.01)
SLACK = 1 + 3 * TRANSFER_COST
"""The objective prefers less traffic by as much."""


def chain(
    device_bytes: int,
    count: int = 3,
    *,
    states: int = 0,
    trainable: bool = True,
    cpu_s: float = math.inf,
    device_s: float = 0.0,
    link: Link | None = None,
    save: int = 0,
    management_s: float = 0.0,
    rest: OffloadMachine | None = None,
) -> OffloadProblem:
    """Blocks that compute 10 s forward and 20 s backward, with a weight of 10 bytes each."""
    blocks = tuple(OffloadBlock((OffloadOption(10.0, 20.0, save, save, save),)) for _ in range(count))
    tensors = [
        (ParameterTensor(f"p{b}", 10, 10 * states if trainable else 0, trainable, device_s, cpu_s), [b])
        for b in range(count)
    ]
    machine = rest or OffloadMachine(0, Link(1.0, 1.0))
    machine = replace(machine, device_bytes=device_bytes, link=link or machine.link, management_s=management_s)
    return OffloadProblem(blocks, group_parameters(tensors), machine)


def time_of(problem: OffloadProblem, limits: OIlpLimits | None = None) -> float:
    """Objective; infinite where there is no plan."""
    answer = o_ilp(problem, EXACT, limits=limits)
    return math.inf if answer.solution is None else answer.solution.objective_s


def test_everything_fits() -> None:
    answer = o_ilp(chain(30), EXACT)
    assert answer.status == "optimal"
    assert answer.solution is not None
    assert answer.solution.objective_s == pytest.approx(90.0)
    assert answer.gap <= 1e-3
    assert all(sum(f.reloaded) == 0 for f in answer.solution.groups)


def test_by_hand() -> None:
    """20 bytes of 30. The weight of block 2 has to be gone when that of block 0 comes up for B_0, in B_1: so it goes
    down right after its update, 10 s in which B_2 computes nothing. Everything else hides behind computing."""
    answer = o_ilp(chain(20), EXACT)
    assert answer.solution is not None
    assert answer.solution.objective_s == pytest.approx(100.0)
    assert answer.solution.step_times_s == pytest.approx((10, 10, 10, 30, 20, 20))
    last = answer.solution.groups[2]
    assert last.offloaded == pytest.approx((0, 0, 0, 1, 0, 0))
    assert last.stored == pytest.approx((0, 0, 1, 1, 0, 0))


def test_frozen_parameters_go_up_only() -> None:
    answer = o_ilp(chain(20, trainable=False), EXACT)
    assert answer.solution is not None
    assert answer.solution.objective_s == pytest.approx(90.0)
    assert all(sum(f.offloaded) == 0 for f in answer.solution.groups)


def test_the_smallest_budget() -> None:
    """A block, and the one that comes up beside it."""
    answer = o_ilp(chain(19), EXACT)
    assert answer.status == "infeasible"
    assert answer.solution is None
    assert answer.smallest_budget_bytes == 20
    assert o_ilp(chain(20), EXACT).solution is not None
    # With momentum the states of a block, the weight beside it, and its states.
    smallest, _ = smallest_budget(chain(1, states=1), EXACT)
    assert smallest is not None
    assert math.isinf(time_of(chain(smallest - 2, states=1)))
    assert math.isfinite(time_of(chain(smallest, states=1)))


def test_slow_links_show() -> None:
    """Up in F_1 and B_1 (and what goes down after B_2) at half the speed: 20 s each; only F_1 is shorter than that."""
    assert time_of(chain(20, link=Link(1.0, 0.5))) == pytest.approx(110.0)
    assert time_of(chain(20, link=Link(0.5, 1.0))) == pytest.approx(100.0 + 10.0 + 10.0, rel=1e-3)


def test_both_directions_share_a_duplex_link() -> None:
    free = time_of(chain(20))
    assert time_of(chain(20, link=Link(1.0, 1.0, 2.0))) == pytest.approx(free)
    shared = time_of(chain(20, link=Link(1.0, 1.0, 0.5)))
    assert shared > free + 1
    total = 2 * 10 + 2 * 10
    assert shared >= total / 0.5


def test_updates_take_time_where_they_are_made() -> None:
    on_device = time_of(chain(60, states=1, device_s=4.0))
    assert on_device == pytest.approx(90.0 + 12.0)
    # On the CPU they are free beside computing, but for block 0, whose next use comes too soon.
    answer = o_ilp(chain(60, states=1, device_s=4.0, cpu_s=10.0), EXACT)
    assert answer.solution is not None
    assert answer.solution.groups[0].on_cpu == 0
    assert answer.solution.objective_s < on_device
    slow = o_ilp(chain(60, states=1, device_s=4.0, cpu_s=math.inf), EXACT)
    assert slow.solution is not None
    assert all(f.on_cpu == 0 and not any(f.updated) for f in slow.solution.groups)


def test_the_way_of_a_gradient_takes_three_steps() -> None:
    """Down at g_w or later, then the update, then up, each in a step of its own."""
    problem = chain(60, count=4, states=2, device_s=50.0, cpu_s=5.0)
    answer = o_ilp(problem, EXACT)
    assert answer.solution is not None
    for group, f in zip(problem.groups[1:], answer.solution.groups[1:]):
        assert f.on_cpu > 0.9
        order = [problem.last_gradient(group), *problem.after(problem.last_gradient(group), problem.first_use(group))]
        for k in range(len(order)):
            past, now = order[:k], [*order[:k], order[k]]
            assert sum(f.updated[t] for t in now) <= sum(f.gradients[t] for t in past) + 1e-6
            missing = f.on_cpu - sum(f.updated[t] for t in past)
            if k:
                assert f.stored[order[k]] + f.reloaded[order[k]] <= 1 - missing + 1e-6


def test_management_of_every_step() -> None:
    assert time_of(chain(30, management_s=15.0)) == pytest.approx(3 * 15 + 3 * 20)


def test_activations_use_the_link_and_the_host() -> None:
    keep = OffloadOption(10.0, 20.0, 10, 10, 10)
    offload = OffloadOption(10.0, 20.0, 0, 10, 10, offload_bytes=30)
    machine = OffloadMachine(25, Link(1.0, 1.0))
    problem = OffloadProblem((OffloadBlock((keep, offload)),) * 3, (), machine)
    answer = o_ilp(problem, EXACT)
    assert answer.solution is not None
    # Blocks 0 and 1 cannot both keep; 30 s down in F and up in B.
    assert sorted(answer.solution.options[:2]) == [0, 1]
    assert answer.solution.objective_s == pytest.approx(90 + 20 + 10)
    assert math.isinf(time_of(replace(problem, machine=replace(machine, host_bytes=29))))
    assert time_of(replace(problem, machine=replace(machine, host_bytes=30))) == pytest.approx(120)


def test_tied_parameters_are_updated_once_and_stay_for_both() -> None:
    blocks = tuple(OffloadBlock((OffloadOption(10.0, 20.0, 0, 0, 0),)) for _ in range(3))
    tensors = [(ParameterTensor("tied", 10, 10, True, 4.0), [0, 2]), (ParameterTensor("p1", 10, 10, True, 4.0), [1])]
    problem = OffloadProblem(blocks, group_parameters(tensors), OffloadMachine(100, Link(1.0, 1.0)))
    assert problem.last_gradient(problem.groups[0]) == 5
    assert time_of(problem) == pytest.approx(98.0)


@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems(max_blocks=3))
def test_equals_enumeration_of_options(problem: OffloadProblem) -> None:
    counts = [range(len(b.options)) for b in problem.blocks]
    times = [time_of(problem, OIlpLimits(options=o)) for o in itertools.product(*counts)]
    best = time_of(problem)
    assert math.isinf(best) == math.isinf(min(times))
    if math.isfinite(best):
        assert min(times) / SLACK - 1e-6 <= best <= min(times) * SLACK + 1e-6


@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems(max_blocks=3))
def test_more_of_anything_is_never_slower(problem: OffloadProblem) -> None:
    machine = problem.machine
    faster = Link(2 * machine.link.offload_bytes_per_s, 2 * machine.link.reload_bytes_per_s)
    base = time_of(problem)
    for better in (
        replace(machine, device_bytes=machine.device_bytes + 10),
        replace(machine, link=faster),
        replace(machine, disk=Link(100.0, 100.0)),
    ):
        assert time_of(replace(problem, machine=better)) <= base * SLACK + 1e-6
    assert time_of(problem, OIlpLimits(reach=2)) >= base / SLACK - 1e-6


@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems(max_blocks=3))
def test_bounds_hold(problem: OffloadProblem) -> None:
    answer = o_ilp(problem, EXACT)
    if answer.solution is None:
        return
    assert answer.bound_s <= answer.solution.objective_s
    assert answer.gap <= 2e-3
    assert lower_bound(problem).total_s <= answer.solution.objective_s * (1 + 1e-6) + 1e-6


def test_the_disk_holds_what_the_host_cannot() -> None:
    def with_host(host_bytes: int, rate: float) -> float:
        rest = OffloadMachine(0, Link(1.0, 1.0), host_bytes=host_bytes, disk=Link(rate, rate))
        return time_of(chain(40, count=5, states=1, rest=rest))

    plenty = with_host(1000, 1.0)
    assert math.isfinite(plenty)
    assert math.isinf(time_of(chain(40, count=5, states=1, rest=OffloadMachine(0, Link(1.0, 1.0), host_bytes=20))))
    assert plenty <= with_host(20, 10.0) * SLACK
    assert with_host(20, 10.0) < with_host(20, 0.2)
    assert math.isinf(
        time_of(
            chain(
                40,
                count=5,
                states=1,
                rest=OffloadMachine(0, Link(1.0, 1.0), host_bytes=20, disk=Link(1.0, 1.0), disk_bytes=10),
            )
        )
    )


def test_the_batch_that_is_chosen_is_the_best_of_the_range() -> None:
    """One sample takes 1 s a block and 4 bytes; weights are moved once for all samples."""
    blocks = tuple(OffloadBlock((OffloadOption(1.0, 2.0, 2, 4, 4),)) for _ in range(4))
    tensors = [(ParameterTensor(f"p{b}", 40, 0, True, 1.0), [b]) for b in range(4)]
    machine = OffloadMachine(160, Link(5.0, 5.0))
    problem = OffloadProblem(blocks, group_parameters(tensors), machine)
    chosen = o_ilp(problem, EXACT, limits=OIlpLimits(batch=(1.0, 20.0))).solution
    assert chosen is not None

    def per_sample(batch: int) -> float:
        def grown(o: OffloadOption) -> OffloadOption:
            times = batch * o.forward_time_s, batch * o.backward_time_s
            return OffloadOption(
                *times, batch * o.save_bytes, batch * o.forward_peak_bytes, batch * o.backward_peak_bytes
            )

        larger = tuple(OffloadBlock(tuple(map(grown, b.options))) for b in problem.blocks)
        return time_of(replace(problem, blocks=larger)) / batch

    neighbours = math.floor(chosen.batch), math.ceil(chosen.batch)
    by_batch = {b: per_sample(b) for b in sorted({1, 5, 10, 15, 20, *neighbours})}
    assert chosen.objective_s <= min(by_batch.values()) * SLACK
    assert min(by_batch[b] for b in neighbours) <= min(by_batch.values()) * 1.05
    assert 1 < chosen.batch < 20


def solve_llama(problem: OffloadProblem, **limits: int) -> OIlpAnswer:
    return o_ilp(problem, ROUGH, limits=OIlpLimits(**limits))  # type: ignore[arg-type]


def test_the_ablation_orders_as_in_the_preprint() -> None:
    """Table 2: all, without updates on the CPU, without activation offload."""
    answers = [
        solve_llama(problem, reach=8)
        for problem in (
            llama(rtx3060()),
            llama(rtx3060(), alpha_c=0.0),
            llama(rtx3060(), activation_offload=False),
        )
    ]
    overheads = []
    for answer in answers:
        assert answer.solution is not None
        assert answer.gap <= 0.015
        overheads.append(answer.solution.objective_s / compute_s(llama(rtx3060())) - 1)
    assert overheads == sorted(overheads)
    assert overheads[2] - overheads[0] > 0.1


def test_a_short_reach_loses_nothing_on_a_llama() -> None:
    problem = llama(rtx3060(8 * GIB), (4096, 11008, 8, 32000, 4096))
    whole = solve_llama(problem).solution
    near = solve_llama(problem, reach=6).solution
    assert whole is not None
    assert near is not None
    assert near.objective_s <= whole.objective_s * 1.012


def test_relax_and_round_is_near_the_optimum() -> None:
    problem = llama(rtx3060(8 * GIB), (4096, 11008, 10, 32000, 4096))
    exact = o_ilp(problem, ROUGH, limits=OIlpLimits(reach=8))
    rounded = o_ilp(problem, ROUGH, limits=OIlpLimits(reach=8), method="relax_and_round")
    assert exact.solution is not None
    assert rounded.solution is not None
    assert rounded.solution.objective_s <= exact.solution.objective_s * 1.03
    assert rounded.bound_s <= exact.solution.objective_s


def test_every_program_with_integers_starts_from_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a small gap is asked for, the relaxation is first: if it has no solution, no such program is asked."""
    keep, offload = OffloadOption(10.0, 20.0, 10, 10, 10), OffloadOption(10.0, 20.0, 0, 10, 10, offload_bytes=30)
    cases = [(35, ROUGH, [True]), (5, ROUGH, [False, True]), (35, EXACT, [True]), (5, EXACT, [True])]
    for device_bytes, limits, expected in cases:  # the last of 5 asks what would be enough
        door = Door()
        monkeypatch.setattr("stowage.stages.formulations.offload.o_ilp.solve.solve_milp", door)
        blocks = (OffloadBlock((keep, offload)),) * 5
        answer = o_ilp(OffloadProblem(blocks, (), OffloadMachine(device_bytes, Link(1.0, 1.0))), limits)
        assert answer.status == ("optimal" if device_bytes == 35 else "infeasible")
        assert door.starts == expected


class NoTime(Door):
    """Programs with integers find nothing in time, or less than what is known."""

    def __call__(self, problem: Any, settings: SolverSettings, **more: Any) -> SolverOutcome:
        if problem.isMIP():
            return SolverOutcome("unknown", math.inf, -math.inf, "none", settings.time_limit_s)
        return super().__call__(problem, settings, **more)


def test_where_integers_take_too_long_the_rounded_relaxation_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the relaxation's bound, with a batch that is chosen too."""
    problem = llama(rtx3060(8 * GIB), (4096, 11008, 6, 32000, 4096))
    for batch in (None, (1.0, 16.0)):
        limits = OIlpLimits(reach=8, batch=batch)
        exact = o_ilp(problem, ROUGH, limits=limits)
        with monkeypatch.context() as patch:
            patch.setattr("stowage.stages.formulations.offload.o_ilp.solve.solve_milp", NoTime())
            late = o_ilp(problem, EXACT, limits=limits)
        assert late.status == "feasible"
        assert exact.solution is not None
        assert late.solution is not None
        assert late.bound_s <= exact.solution.objective_s * SLACK
        assert late.bound_s > 0
        assert exact.solution.objective_s <= late.solution.objective_s * 1.01


@pytest.mark.parametrize("near", [0.05, 0.0])
@settings(max_examples=examples(8), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problems(max_blocks=3))
def test_with_a_limit_that_is_short_for_integers_answers_are_near_the_optimum(
    near: float, problem: OffloadProblem
) -> None:
    """The relaxation comes first; where what was rounded is farther from it than `NEAR_RELAXATION`, integers follow."""
    best = time_of(problem)
    module = "stowage.stages.formulations.offload.o_ilp.solve"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.INTEGERS_S", math.inf)
        patch.setattr(f"{module}.NEAR_RELAXATION", near)
        found = time_of(problem)
    assert math.isinf(best) == math.isinf(found)
    if math.isfinite(best):
        assert best / SLACK - 1e-6 <= found <= best / (1 - near) * SLACK + 1e-6


def test_a_rounded_relaxation_within_the_gap_is_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound proves it, whatever programs with integers find in time."""
    problem = llama(rtx3060(8 * GIB), (4096, 11008, 8, 32000, 4096))
    monkeypatch.setattr("stowage.stages.formulations.offload.o_ilp.solve.solve_milp", NoTime())
    answer = o_ilp(problem, replace(ROUGH, gap=0.2), limits=OIlpLimits(reach=8))
    assert answer.status == "optimal"
    assert answer.gap <= 0.2


def test_equal_inputs_give_an_equal_solution() -> None:
    problem = llama(rtx3060(8 * GIB), (4096, 11008, 5, 32000, 4096))
    first, second = (o_ilp(problem, ROUGH).solution for _ in range(2))
    assert first == second


def test_every_equation_is_in_the_model() -> None:
    machine = OffloadMachine(40, Link(1.0, 1.0, 1.5), host_bytes=15, disk=Link(1.0, 1.0, 1.5), disk_bytes=20)
    problem = chain(40, count=4, states=1, device_s=1.0, cpu_s=1.0, save=1, rest=machine)
    names = set(build(problem, OIlpLimits()).model.constraints)
    for number in EQUATIONS:
        prefix = constraint_prefix(number)
        assert any(name == prefix or name.startswith(prefix + "_") for name in names), number
    prefixes = {constraint_prefix(number) for number in EQUATIONS}
    assert all(any(re.match(rf"{p}(_|$)", name) for p in prefixes) for name in names)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": (OffloadBlock(()),)}, "no options"),
        ({"groups": group_parameters([(ParameterTensor("p", 1), [7])])}, "does not exist"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(chain(30), **change)  # type: ignore[arg-type]


def test_small_tensors_are_pinned_and_counted() -> None:
    tensors = [(ParameterTensor("big", 20, 40), [0]), (ParameterTensor("small", 2, 4), [0])]
    (group,) = group_parameters(tensors, smallest_bytes=10)
    assert [t.name for t in group.pinned] == ["small"]
    assert group.pinned_bytes == 6
    problem = OffloadProblem(
        (OffloadBlock((OffloadOption(1, 1, 0, 0, 0),)),), (group,), OffloadMachine(65, Link(1.0, 1.0))
    )
    assert math.isinf(time_of(problem))
    assert math.isfinite(time_of(replace(problem, machine=OffloadMachine(66, Link(1.0, 1.0)))))
