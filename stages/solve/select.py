"""Race all plans in the referee, and keep the fastest within the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot, plan_hash
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import ADD, CLIP, left_behind, pinned, taken_gradients
from stowage.stages.simulate.plan import Outcome, Step
from stowage.stages.simulate.slots import slots_of
from stowage.stages.simulate.together import Judge, updates_together
from stowage.stages.solve.binding import infeasible
from stowage.stages.solve.in_memory import Candidate, Race, in_memory, keep_everything, orders
from stowage.stages.solve.known import Known
from stowage.stages.solve.offload.offloader import Below, Offloader, OffloadPlan
from stowage.stages.solve.offload.plans import tiered_plans
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.program import Program
from stowage.stages.solve.request import PlanRequest

SAME_SPEED = 1.001
"""Predictions do not tell plans apart that differ by less."""

COARSER = 3
"""Where nothing fits, a table of so many times fewer slots is looked at too."""


@dataclass(frozen=True)
class Solved:
    """A plan that the referee accepted."""

    rows: list[PlanRow]
    summary: PlanSummary
    slots: list[Slot] = field(default_factory=list)


def _taken(options: Sequence[Option], blocks: Sequence[Block], request: PlanRequest) -> list[Option]:
    """The options that the method takes; raises `ParameterError` where it has none of a block's."""
    taken = [o for o in options if request.takes(o.formulation)]
    lacking = {o.block_hash for o in options} - {o.block_hash for o in taken}
    for block in blocks:
        if block.block_hash in lacking:
            raise ParameterError(
                f"method {request.method} has no schedule of block {block.block} ({block.label}) that is not beaten by "
                "another's: take auto here."
            )
    return taken


def program_of(trace: TraceTables, nodes: Sequence[ComputeNode]) -> Program:
    taken = taken_gradients(trace.calls)
    storage_of = [v.storage for v in trace.values]
    waiting = frozenset(s.storage for s in trace.storages if s.role == "gradient")
    return Program(
        trace.storages,
        nodes,
        keep=frozenset(storage_of[v] for v in left_behind(trace)),
        consumed=waiting.intersection(storage_of[v] for v in taken),
        gradients=_gradients_that_stay(trace),
        pinned=pinned(trace),
    )


def _gradients_that_stay(trace: TraceTables) -> dict[int, str]:
    """Storages of gradients that this micro-batch leaves in `.grad` as they were made, and their parameters."""
    behind = left_behind(trace)
    if any(v in behind for c in trace.calls if c.target == CLIP for v in c.returns):
        return {}  # they are scaled at the end
    stays = [g for g in trace.gradients if g.gradient_value in behind]
    return {trace.values[g.gradient_value].storage: g.parameter for g in stays}


def eager_peak_bytes(trace: TraceTables, nodes: Sequence[ComputeNode]) -> int:
    """Predicted peak of plain PyTorch: nothing recomputed, every gradient kept until all updates follow backward.

    Additions to waiting gradients take place during backward, as eager's do.
    """
    program = program_of(trace, nodes)
    program = Program(program.storages, nodes, program.keep)
    late = [n.phase == "update" and trace.calls[n.calls[0]].target != ADD for n in nodes]
    order = [n for n in nodes if not late[n.node]] + [n for n in nodes if late[n.node]]
    return program.peak_bytes([Execution(n.node, "eager") for n in order])


def solve_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    options: Sequence[Option],
    request: PlanRequest,
    known: Known | None = None,
) -> Solved:
    """Plan the iteration.

    Args:
        trace, nodes, blocks, options: what the earlier stages wrote.
        request: what is asked for.
        known: of the same step, options and method, from plans within other budgets.

    Raises:
        Infeasible: with the smallest budget for which a plan was found.
        ParameterError: the method has none of the options of a block.
        TableError: options are missing.
    """
    budget_bytes = request.device_budget_bytes
    known = known if known is not None else Known()
    program = known.once("program", lambda: program_of(trace, nodes))
    options = _taken(options, blocks, request)
    chain = known.once("chain", lambda: Chain(blocks, nodes, options))
    race = Race(program, chain, budget_bytes, polishes=request.polishes, known=known)

    def replayed(plan: Candidate) -> Outcome:
        found: Outcome = known.of(plan, "replay", lambda p: program.replay(p.executions))
        return found

    everything = keep_everything(race)
    plans: list[Candidate] = []
    smallest: list[Outcome] = []
    if not request.offloads_only:
        plans, leanest = in_memory(race, everything, request.slots, request.method)
        smallest.append(replayed(leanest))
    fitting = [p for p in plans if p.peak_bytes <= budget_bytes]
    moving: list[OffloadPlan] = []
    if request.below is not None and not request.recomputes_only:
        fastest_s = min((p.time_s for p in fitting), default=math.inf)
        offloader = Offloader(program, chain, request.below)
        found, moving = tiered_plans(offloader, orders(race, everything, request.slots), request, fastest_s)
        smallest += [p.outcome for p in found]
    if not smallest:
        smallest.append(replayed(in_memory(race, everything, request.slots, request.method)[1]))
    if not fitting and not moving and request.method == "auto":
        for plans, leanest in _others(race, everything, request):
            smallest.append(replayed(leanest))
            fitting += [p for p in plans if p.peak_bytes <= budget_bytes]
    least = min(smallest, key=lambda o: o.peak_bytes)
    if not fitting and not moving:
        raise infeasible(budget_bytes, least, trace, nodes)
    best = min(fitting, key=lambda p: (p.time_s, p.method != "keep_all", p.peak_bytes), default=None)
    moved = _best_moving(moving)
    tiered: list[Slot] = []
    fractional_s = rates_bound_s = 0.0
    if moved is not None and (best is None or moved.outcome.time_s < best.time_s):
        method, outcome = moved.method, moved.outcome
        fractional_s, rates_bound_s = moved.fractional_s, moved.rates_bound_s
        tiered = slots_of(trace, moved.steps, moved.state)
        judge: Judge = partial(_judged, offloader, moved)
    else:
        assert best is not None
        method, outcome, judge = best.method, program.replay(best.executions), program.judge
        if method == "rockmate" and request.method != "auto":
            method = request.method
    outcome = updates_together(trace, nodes, outcome, budget_bytes, judge)
    if outcome.peak_bytes > budget_bytes:
        raise AssertionError(f"the referee found a peak of {outcome.peak_bytes} in the plan of {method}")
    summary = summary_of(trace, nodes, options, outcome, method, everything, least.peak_bytes, request)
    return Solved(outcome.rows, replace(summary, fractional_time_s=fractional_s, rates_bound_s=rates_bound_s), tiered)


def _judged(offloader: Offloader, plan: OffloadPlan, steps: Sequence[Step]) -> Outcome:
    return offloader.judged(plan.method, list(steps), plan.state, plan.state.on_disk).outcome


def _others(race: Race, everything: Candidate, request: PlanRequest) -> Iterator[tuple[list[Candidate], Candidate]]:
    """Plans, and the one that takes least memory, of tables that round otherwise: now and then a coarser one, or
    Rotor's, which has fewer options, has a sequence whose true peak is lower by a little."""
    yield in_memory(race, everything, max(1, request.slots // COARSER), request.method)
    whole = replace(request, method="rotor")
    chain = race.chain
    options = [o for found in chain.options.values() for o in found if whole.takes(o.formulation)]
    known = race.known.part("rotor")
    coarse = known.once("chain", lambda: Chain(chain.blocks, chain.nodes, options))
    own = Race(race.program, coarse, race.budget_bytes, polishes=race.polishes, known=known)
    plans, leanest = in_memory(own, everything, request.slots, whole.method)
    yield [replace(p, method=whole.method) for p in plans], leanest


def _best_moving(plans: Sequence[OffloadPlan]) -> OffloadPlan | None:
    """The fastest; of those that are as fast as can be told, the one that moves least."""
    if not plans:
        return None
    limit_s = min(p.outcome.time_s for p in plans) * SAME_SPEED
    close = [p.outcome for p in plans if p.outcome.time_s <= limit_s]
    least = min(o.offload_bytes + o.reload_bytes for o in close)
    few = [p for p in plans if p.outcome in close and p.outcome.offload_bytes + p.outcome.reload_bytes == least]
    return min(few, key=lambda p: (p.outcome.time_s, p.outcome.peak_bytes))


def lower_bound_s(nodes: Iterable[ComputeNode], below: Below | None) -> float:
    """Every node once; updates only where the CPU cannot take them over."""
    beside = below is not None and below.cpu_update_bytes_per_s > 0
    return sum(n.time_s for n in nodes if not (beside and n.phase == "update"))


def summary_of(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    options: Sequence[Option],
    outcome: Outcome,
    method: str,
    everything: Candidate,
    smallest_feasible_bytes: int,
    request: PlanRequest,
) -> PlanSummary:
    """What the plan states about itself; without options its rows come from elsewhere."""
    worst = max(options, key=lambda o: o.gap, default=None)
    gap = 1 - outcome.once_time_s / outcome.time_s
    return PlanSummary(
        plan_hash=plan_hash(outcome.rows, trace.meta.configuration_hash, request.device_budget_bytes),
        configuration_hash=trace.meta.configuration_hash,
        method=method,
        device=request.device,
        device_budget_bytes=request.device_budget_bytes,
        device_peak_bytes=outcome.peak_bytes,
        baseline_bytes=outcome.baseline_bytes,
        step_time_s=outcome.time_s,
        lower_bound_s=min(outcome.once_time_s, outcome.time_s),  # the same times, added up in another order
        recomputed_bytes=outcome.recomputed_bytes,
        activation_bytes=outcome.activation_bytes,
        keep_all_peak_bytes=everything.peak_bytes,
        keep_all_time_s=everything.time_s,
        smallest_feasible_bytes=smallest_feasible_bytes,
        solver=", ".join(sorted({o.formulation for o in options})) or "none",
        status="optimal" if gap < 1e-9 else worst.status if worst is not None else "heuristic",
        gap=max(gap, 0.0),
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        device_fingerprint=request.device_fingerprint,
        estimated_nodes=sum(n.estimated for n in nodes),
        below_bytes=outcome.below_bytes,
        offload_bytes=outcome.offload_bytes,
        reload_bytes=outcome.reload_bytes,
        wait_s=outcome.wait_s,
        disk_bytes=outcome.disk_bytes,
    )
