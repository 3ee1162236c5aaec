"""Lets every source propose plans, judges them, and keeps the fastest within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.exposure import exposed
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.together import updates_together
from stowage.stages.solve.binding import infeasible
from stowage.stages.solve.collectives.group_race import GroupRace
from stowage.stages.solve.collectives.groups import GroupPolicies
from stowage.stages.solve.collectives.policies import ShardingPolicies
from stowage.stages.solve.evicted import GreedyEviction, LeastEvicted
from stowage.stages.solve.in_memory import (
    InMemory,
    keep_everything,
    order_maker_of,
    orders_to_offload_from,
    policy_orders,
)
from stowage.stages.solve.judged_plans import JudgedPlans
from stowage.stages.solve.known import Known
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.sources import gradients_wait, offload_sources
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.evicting import EVICTION
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.order import Order
from stowage.stages.solve.proposal import JudgedPlan, Source, Task
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.summary import KeepingAll, Solved, lower_bound_s, solved

COARSER_SLOTS = 3
"""Where nothing fits, a table of so many times fewer slots is solved too."""


def solve_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    options: Sequence[Option],
    request: PlanRequest,
    known: Known | None = None,
    *,
    bound_s: float | None = None,
) -> Solved:
    """Plan the iteration.

    Args:
        trace: the trace of the step.
        nodes: its compute nodes.
        blocks: its blocks.
        options: the options of its blocks.
        request: what is asked for.
        known: what plans of the same step, options and method within other budgets have found.
        bound_s: the lower bound that the summary states; by default that of these nodes.

    Raises:
        Infeasible: with the smallest budget for which a plan was found.
        ParameterError: the method has none of the options of a block.
        TableError: options are missing.
    """
    known = known if known is not None else Known()
    taken = _taken(options, blocks, request)
    program = known.once("program", lambda: program_of(trace, nodes))
    counted = exposed(nodes)
    planned = program if counted is nodes else known.once("counted", lambda: program_of(trace, counted))
    task = Task(planned, known.once("chain", lambda: Chain(blocks, counted, taken)), request, known)
    everything = keep_everything(order_maker_of(task))
    plans = JudgedPlans(Referee(program, task.budget_bytes, known))
    enough_s = request.enough * (bound_s if bound_s is not None else lower_bound_s(nodes, request.lower_tier))
    for source, own_task in _sources(task, everything, plans, enough_s):
        plans.hear(source, own_task)
    least = plans.leanest().outcome
    best = plans.fastest()
    if best is None:
        raise infeasible(task.budget_bytes, least, trace, nodes)
    best = updated_together(trace, nodes, best, plans.referee, task.budget_bytes)
    keeping_all_s = everything.time_s
    if counted is not nodes:
        keeping_all_s = min([p.time_s for p in plans.fitting if p.method == everything.method], default=keeping_all_s)
    keeping_all = KeepingAll(everything.peak_bytes, keeping_all_s)
    smallest_bytes = min(least.peak_bytes, best.outcome.peak_bytes)
    return solved(trace, nodes, best, keeping_all, smallest_bytes, request, bound_s)


def _sources(task: Task, everything: Order, plans: JudgedPlans, enough_s: float) -> Iterator[tuple[Source, Task]]:
    """Yield the makers of plans that a request asks for, each with its task, in the order in which they are heard.

    Later ones are asked only where the earlier ones, whose plans are in `plans` by then, are not good enough: those
    that offload beside plans in memory, and policies for groups beside both, where none takes `enough_s` or less.
    """
    request = task.request
    sharded = any(n.collective for n in task.program.nodes) and request.method == "auto"
    offloader = _group_offloader(task, sharded=sharded)
    if offloader is not None and sharded:
        yield GroupRace(offloader), task  # takes little, and spares much of what the others would do in vain
    if not request.offloads_only:
        yield InMemory(everything, request.method, request.slots), task
        if request.method == "auto":
            yield GreedyEviction(everything, plans), task
        if sharded:
            yield ShardingPolicies(policy_orders(order_maker_of(task), everything)), task
    if plans.fastest_s <= enough_s:
        return
    if request.lower_tier is not None and not request.recomputes_only:
        for source in offload_sources(
            task, request.lower_tier, orders_to_offload_from(order_maker_of(task), everything, request.slots), plans
        ):
            yield source, task
    if plans.fastest_s <= enough_s:
        return
    if offloader is not None:
        yield GroupPolicies(offloader, plans), task
    if not plans.judged:
        yield InMemory(everything, request.method, request.slots, only_bound=True), task
    lacking = all(p.method == EVICTION for p in plans.fitting)
    if not plans.fitting and request.method == "auto":
        yield LeastEvicted(), task
    if lacking and request.method == "auto":
        # Last resort: rounding to slots differs in a coarser table, and in Rotor's with its fewer options; one of them
        # may have a sequence whose true peak is lower by a little.
        yield InMemory(everything, request.method, max(1, request.slots // COARSER_SLOTS)), task
        yield InMemory(everything, "rotor", request.slots), _only(task, "rotor")


def _group_offloader(task: Task, *, sharded: bool) -> Offloader | None:
    """Return what lowers choices for groups of parameters, where such may be proposed."""
    request = task.request
    if request.lower_tier is None or request.recomputes_only:
        return None
    if not sharded and not (request.method == "auto" and request.lower_tier.cpu_update_bytes_per_s > 0):
        return None
    offloader = Offloader(task.program, task.chain, request.lower_tier)
    return None if gradients_wait(offloader) else offloader


def _only(task: Task, method: str) -> Task:
    """Return the task with only the options that another method takes."""
    chain, other = task.chain, replace(task.request, method=method)
    options = [o for found in chain.options.values() for o in found if other.takes(o.formulation)]
    known = task.known.part(method)
    return replace(task, chain=known.once("chain", lambda: Chain(chain.blocks, chain.nodes, options)), known=known)


def _taken(options: Sequence[Option], blocks: Sequence[Block], request: PlanRequest) -> list[Option]:
    """Return the options that the method takes.

    Raises:
        ParameterError: there is none for a block.
    """
    taken = [o for o in options if request.takes(o.formulation)]
    lacking = {o.block_hash for o in options} - {o.block_hash for o in taken}
    for block in blocks:
        if block.block_hash in lacking:
            raise ParameterError(
                f"method {request.method} has no schedule of block {block.block} ({block.label}) that is not beaten by "
                "another's: take auto here."
            )
    return taken


def updated_together(
    trace: TraceTables, nodes: Sequence[ComputeNode], plan: JudgedPlan, referee: Referee, budget_bytes: int
) -> JudgedPlan:
    """Return the plan with the updates of several parameters in one call, where that is as good.

    Raises:
        AssertionError: the plan does not fit the budget.
    """
    outcome = updates_together(
        trace, nodes, plan.outcome, budget_bytes, lambda steps: referee.outcome(steps, plan.state, plan.tier)
    )
    if outcome.peak_bytes > budget_bytes:
        raise AssertionError(f"the referee found a peak of {outcome.peak_bytes} in the plan of {plan.method}")
    return replace(plan, outcome=outcome)
