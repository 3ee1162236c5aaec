"""Greedy eviction: legal and within the budget for every rule, never below the optimum, and it only ever adds plans."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.eviction.evict import evict
from stowage.stages.formulations.eviction.rule import RULES
from stowage.stages.formulations.eviction.step import EvictionStep
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.trace import TraceTables
from stowage.stages.solve import PlanRequest, solve_plan
from stowage.stages.solve.program.evicting import EVICTION, Evicting, eviction_step
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.proposal import Decision, Proposal
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.summary import KeepingAll, solved
from tests.matrix import examples, some
from tests.runtime.beside_eager import adamw, assert_equal_training
from tests.solve.judged import replayed
from tests.solve.prepared import Prepared, prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps
from tests.zoo import ZOO

QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def chain(sizes: list[int], times: list[float]) -> EvictionStep:
    """A chain whose backward reads every value of forward, the last one first."""
    count = len(sizes)
    reads = [() if k == 0 else (k - 1,) for k in range(count)]
    reads += [(count - 1 - k, *((count + k - 1,) if k else ())) for k in range(count)]
    return EvictionStep(
        time_s=[*times, *[1.0] * count],
        workspace_bytes=[0] * 2 * count,
        reads=reads,
        creates=[(k,) for k in range(2 * count)],
        takes=[()] * 2 * count,
        once=[False] * 2 * count,
        last_again=[2 * count] * 2 * count,
        freed_bytes=[0] * 2 * count,
        nbytes=[*sizes, *[1] * count],
        stays=frozenset({2 * count - 1}),
    )


def test_what_is_cheap_and_large_is_dropped() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    assert [r.node for r in evict(step, RULES[0], 40) or []] == [0, 1, 2, 3, 4, 5, 6, 7]
    # Of the three values of ten bytes the second is made in the least time.
    assert [r.node for r in evict(step, RULES[1], 25) or []] == [0, 1, 2, 3, 4, 5, 1, 6, 7]


def test_what_runs_once_stays() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    kept = replace(step, once=[False, True, *[False] * 6])
    assert [r.node for r in evict(kept, RULES[1], 25) or []] == [0, 1, 2, 3, 4, 5, 6, 0, 7]
    assert evict(replace(step, once=[True] * 8), RULES[1], 25) is None


def test_nothing_is_dropped_that_could_not_be_made_again_in_time() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    late = replace(step, last_again=[8, 5, 8, 8, 8, 8, 8, 8])
    assert [r.node for r in evict(late, RULES[1], 25) or []] == [0, 1, 2, 3, 4, 5, 6, 0, 7]


def test_runs_that_take_too_long_are_given_up() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    assert evict(step, RULES[1], 25, limit_s=25.5) is not None
    assert evict(step, RULES[1], 25, limit_s=24.5) is None


def test_what_is_decided_to_stay_stays_and_all_else_goes() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    decided = {3: {0, 3}}
    assert [r.node for r in evict(step, RULES[0], 40, kept=decided) or []] == [0, 1, 2, 3, 4, 1, 2, 5, 6, 7]
    # What runs once cannot be made again, and stays whatever is decided.
    once = replace(step, once=[False, True, *[False] * 6])
    assert [r.node for r in evict(once, RULES[0], 40, kept=decided) or []] == [0, 1, 2, 3, 4, 2, 5, 6, 7]


def test_before_it_is_decided_what_is_needed_there_goes_last() -> None:
    step = chain([10, 10, 2, 10], [9.0, 1.0, 1.0, 9.0])
    assert [r.node for r in evict(step, RULES[1], 25, kept={3: {1, 3}}) or []] == [0, 1, 2, 3, 4, 2, 5, 6, 0, 7]


@settings(max_examples=examples(300), **QUICK)
@given(training_steps(), st.floats(0, 1), st.randoms(use_true_random=False))
def test_guided_orders_are_legal_and_fit(trace: TraceTables, share: float, draw: random.Random) -> None:
    prepared = prepare_trace(trace)
    program = program_of(trace, prepared.nodes)
    evicting = Evicting(program)
    least = evicting.leanest(len(RULES))
    assume(least is not None)
    assert least is not None
    high = max(replayed(program, found.executions).peak_bytes for found in evicting.orders(1 << 50, 1))
    budget = int(least.peak_bytes + share * (high - least.peak_bytes))
    decided = {
        node: [s for s in sorted(program.temporary) if draw.random() < 0.5]
        for node in range(len(prepared.nodes))
        if draw.random() < 0.3
    }
    order = evicting.guided(budget, decided, least.time_s)
    if order is not None:
        outcome = replayed(program, order.executions)
        assert outcome.peak_bytes == order.peak_bytes <= budget
        assert outcome.time_s == pytest.approx(order.time_s)


@settings(max_examples=examples(300), **QUICK)
@given(training_steps(), st.floats(0, 1))
def test_every_order_is_legal_and_fits(trace: TraceTables, share: float) -> None:
    prepared = prepare_trace(trace)
    program = program_of(trace, prepared.nodes)
    evicting = Evicting(program)
    least = evicting.leanest(len(RULES))
    assume(least is not None)
    assert least is not None
    high = max(replayed(program, found.executions).peak_bytes for found in evicting.orders(1 << 50, 1))
    budget = int(least.peak_bytes + share * (high - least.peak_bytes))
    assert least.peak_bytes == replayed(program, least.executions).peak_bytes <= high
    assert not list(evicting.orders(least.peak_bytes - 1, len(RULES))), "with a byte less the rules find none"
    for order in evicting.orders(budget, len(RULES)):
        outcome = replayed(program, order.executions)
        assert outcome.peak_bytes == order.peak_bytes <= budget
        assert outcome.time_s == pytest.approx(order.time_s)
        kept = program.retain_where_possible(order.executions, budget)
        after = replayed(program, kept)
        assert after.peak_bytes <= budget
        assert after.time_s <= outcome.time_s + 1e-12


def _plan(prepared: Prepared, budget: int, rules: int) -> tuple[float, int]:
    """Time of the plan and the smallest budget."""
    request = PlanRequest(budget, slots=60, eviction_rules=rules)
    try:
        found = solve_plan(prepared.trace, prepared.nodes, prepared.blocks, prepared.options, request)
    except Infeasible as failure:
        return float("inf"), failure.smallest_feasible_bytes
    prepared.judge(found, budget)
    return found.summary.step_time_s, found.summary.smallest_feasible_bytes


@settings(max_examples=examples(60), **QUICK)
@given(training_steps(), st.floats(0, 1))
def test_no_plan_is_slower_and_no_smallest_budget_larger(trace: TraceTables, share: float) -> None:
    prepared = prepare_trace(trace)
    _, least = _plan(prepared, 1, 0)
    _, lower = _plan(prepared, 1, len(RULES))
    assert lower <= least
    time_s, _ = _plan(prepared, lower, len(RULES))
    assert time_s < float("inf")
    high = prepared.solve().summary.device_peak_bytes
    budget = int(lower + share * (high - lower))
    without, with_rules = _plan(prepared, budget, 0), _plan(prepared, budget, len(RULES))
    assert with_rules[0] <= without[0] + 1e-15


def fastest(step: EvictionStep, budget_bytes: int) -> float:
    """The least time of any schedule of a tiny step, by searching through all states of the memory."""
    count = len(step.reads)
    start = (frozenset[int](), frozenset[int]())
    heap: list[tuple[float, int, frozenset[int], frozenset[int]]] = [(0.0, 0, *start)]
    seen: set[tuple[frozenset[int], frozenset[int]]] = set()
    number = 0
    while heap:
        time_s, _, live, ran = heapq.heappop(heap)
        if (live, ran) in seen:
            continue
        seen.add((live, ran))
        if len(ran) == count and step.stays <= live:
            return time_s
        found = [(time_s, live - {v}, ran) for v in live]
        for node in range(count):
            reads, creates = frozenset(step.reads[node]), frozenset(step.creates[node])
            if not reads <= live or creates & live or (node in ran and step.once[node]):
                continue
            if node in ran and any(n >= step.last_again[node] for n in ran):
                continue
            freed = sum(step.freed_bytes[n] for n in ran)
            taken = max((step.nbytes[v] for v in step.takes[node]), default=0)
            used = sum(step.nbytes[v] for v in live | creates) + step.workspace_bytes[node] - taken - freed
            if used <= budget_bytes:
                found.append((time_s + step.time_s[node], live | creates, ran | {node}))
        for entry in found:
            number += 1
            heapq.heappush(heap, (entry[0], number, *entry[1:]))
    return float("inf")


@settings(max_examples=examples(60), **QUICK)
@given(training_steps(max_layers=2), st.floats(0, 0.9))
def test_nothing_is_faster_than_the_optimum(trace: TraceTables, share: float) -> None:
    prepared = prepare_trace(trace)
    program = program_of(trace, prepared.nodes)
    step = eviction_step(program)
    assume(len(step.reads) <= 11 and not any(n.random for n in prepared.nodes))
    evicting = Evicting(program)
    least = evicting.leanest(len(RULES))
    assume(least is not None)
    assert least is not None
    high = program.peak_bytes(least.executions)
    budget = int(high + share * (max(o.peak_bytes for o in evicting.orders(1 << 50, 1)) - high))
    optimum = fastest(step, budget - program.base_bytes)
    for order in evicting.orders(budget, len(RULES)):
        assert order.time_s >= optimum - 1e-12


@settings(max_examples=examples(100), **QUICK)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=4), st.floats(0, 1))
def test_some_rule_is_close_to_the_optimum_on_small_chains(layers: list[tuple[int, int]], share: float) -> None:
    step = chain([size for size, _ in layers], [float(time) for _, time in layers])
    whole = sum(step.nbytes)
    budget = int(step.least_bytes + share * (whole - step.least_bytes))
    found = [runs for rule in RULES if (runs := evict(step, rule, budget)) is not None]
    optimum = fastest(step, budget)
    times = [sum(step.time_s[run.node] for run in runs) for runs in found]
    assert all(time >= optimum - 1e-9 for time in times)
    if times:
        assert min(times) <= 1.5 * optimum


@pytest.mark.parametrize("name", some(["gpt2", "t5", "unet", "batchnorm"], keep=["unet", "gpt2"]))
def test_training_is_equal_bit_for_bit(name: str) -> None:
    """Dropout is drawn again and batch statistics change once, in whatever order nodes run again."""
    prepared = prepared_zoo(name)
    program = program_of(prepared.trace, prepared.nodes)
    least = Evicting(program).leanest(len(RULES))
    assert least is not None
    steps = program.steps(least.executions)
    plan = Referee(program, least.peak_bytes).judge(Proposal(method=EVICTION, steps=steps, decision=Decision(EVICTION)))
    keeping_all = KeepingAll(least.peak_bytes, least.time_s)
    request = PlanRequest(least.peak_bytes)
    found = solved(prepared.trace, prepared.nodes, plan, keeping_all, least.peak_bytes, request)
    assert found.summary.recomputed_bytes > 0
    prepared.judge(found, least.peak_bytes)
    assert_equal_training(ZOO[name], prepared, found, optimizer=adamw, iterations=2)
