"""Race RK-Rotor against the fixed policies in the referee, and keep the fastest plan within the budget."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from stowage.stages.formulations.rk_rotor import ChainStep, RkRotor
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import Option, PlanRow, PlanSummary, Slot
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import ADD, left_behind, taken_gradients
from stowage.stages.simulate.plan import Outcome
from stowage.stages.solve import search
from stowage.stages.solve.chain import Chain, Execution
from stowage.stages.solve.liveness import Program
from stowage.stages.solve.offload import Below, Offloader, OffloadPlan, slots_of
from stowage.stages.solve.policies import fixed_policies
from stowage.stages.solver.outcome import SolverSettings

CANDIDATES = 12
"""How many of RK-Rotor's plans that fit are polished and compared."""

HEADROOM = 1.5
"""RK-Rotor's table reaches this much beyond the budget: it rounds every size up and frees late, so plans for a larger
nominal memory may truly fit."""


_SAME = 1e-9
"""Sums of the same times in another order."""

OFFMATE_SECONDS = 20.0
OFFMATE_GAP = 0.01
"""Limit and relative gap of one solve of O-ILP."""

POOR = 1.05
"""Plans of whole tensors that take this much longer than O-ILP's fractions are raced against the fixed policies."""


@dataclass(frozen=True)
class Solved:
    """A plan that the referee accepted."""

    rows: list[PlanRow]
    summary: PlanSummary
    slots: list[Slot] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    method: str
    executions: list[Execution]
    time_s: float
    peak_bytes: int


def program_of(trace: TraceTables, nodes: Sequence[ComputeNode]) -> Program:
    taken = taken_gradients(trace.calls)
    storage_of = [v.storage for v in trace.values]
    waiting = frozenset(s.storage for s in trace.storages if s.role == "gradient")
    return Program(
        trace.storages,
        nodes,
        keep=frozenset(storage_of[v] for v in left_behind(trace)),
        consumed=waiting.intersection(storage_of[v] for v in taken),
    )


def eager_peak_bytes(trace: TraceTables, nodes: Sequence[ComputeNode]) -> int:
    """Predicted peak of plain PyTorch: nothing recomputed, every gradient kept until all updates follow backward.

    Additions to waiting gradients take place during backward, as eager's do.
    """
    program = program_of(trace, nodes)
    program = Program(program.storages, nodes, program.keep)
    late = [n.phase == "update" and trace.calls[n.calls[0]].target != ADD for n in nodes]
    order = [n for n in nodes if not late[n.node]] + [n for n in nodes if late[n.node]]
    return program.peak_bytes([Execution(n.node, "eager") for n in order])


class _Race:
    """Makes candidates and keeps what the budget admits."""

    def __init__(self, program: Program, chain: Chain, budget_bytes: int) -> None:
        self.program = program
        self.chain = chain
        self.budget_bytes = budget_bytes

    def candidate(self, method: str, executions: list[Execution], *, polish: bool) -> _Candidate:
        plan = self.program.without_dead(executions)
        if polish and self.program.peak_bytes(plan) <= self.budget_bytes:
            plan = self.program.retain_where_possible(plan, self.budget_bytes)
        time_s = sum(self.program.nodes[e.node].time_s for e in plan)
        return _Candidate(method, plan, time_s, self.program.peak_bytes(plan))

    def table(self, nominal_bytes: int, slots: int) -> RkRotor:
        return RkRotor(self.chain.chain_blocks, slots, max(1, -(-nominal_bytes // slots)))

    def rockmate(self, available_bytes: int, slots: int, *, polish: bool = True) -> Iterator[_Candidate]:
        """RK-Rotor's plans from the largest nominal memory down, one per distinct time, that truly fit."""
        table = self.table(int(available_bytes * HEADROOM), slots)
        smallest = table.smallest_slots()
        if smallest is None:
            return
        previous, found = math.nan, 0
        for m in range(slots, smallest - 1, -1):
            if table.time_s(m) == previous:
                continue
            previous = table.time_s(m)
            plan = self.candidate("rockmate", self.chain.executions(table.sequence(m)), polish=polish)
            if plan.peak_bytes <= self.budget_bytes:
                yield plan
                found += 1
                if found == CANDIDATES:
                    return

    def smallest(self, nominal_bytes: int, slots: int) -> _Candidate | None:
        """The plan with the lowest true peak among RK-Rotor's tightest, looked at through ever finer slots."""
        best: _Candidate | None = None
        for _ in range(3):
            table = self.table(nominal_bytes, slots)
            least = table.smallest_slots()
            if least is None:
                break
            for m in range(least, min(least + 4, slots) + 1):
                plan = self.candidate("rockmate", self.chain.executions(table.sequence(m)), polish=False)
                if best is None or (plan.peak_bytes, plan.time_s) < (best.peak_bytes, best.time_s):
                    best = plan
            nominal_bytes = (least + 1) * table.slot_bytes
        return best

    def below(self, smallest: _Candidate, overhead_bytes: int, slots: int) -> _Candidate:
        """The plan from which the race, asked for one byte less than its peak, finds nothing any more.

        Args:
            smallest: where to start.
            overhead_bytes: in memory besides what RK-Rotor counts.
        """
        while True:
            race = _Race(self.program, self.chain, smallest.peak_bytes - 1)
            found = list(race.rockmate(max(race.budget_bytes - overhead_bytes, 1), slots, polish=False))
            if not found:
                return smallest
            smallest = min(found, key=lambda p: (p.peak_bytes, p.time_s))


def solve_plan(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    options: Sequence[Option],
    *,
    device_budget_bytes: int,
    method: str = "auto",
    slots: int = 500,
    device: str = "",
    device_fingerprint: str = "",
    time_limit_s: float = 0.0,
    seed: int = 0,
    below: Below | None = None,
) -> Solved:
    """Plan the iteration.

    Args:
        trace, nodes, blocks, options: what the earlier stages wrote.
        device_budget_bytes: device bytes of the whole iteration: parameters, optimizer states, buffers, inputs,
            gradients, activations, workspace.
        method: `auto` keeps everything if that fits and else the fastest of RK-Rotor and the fixed policies; `rockmate`
            takes RK-Rotor's best; `offmate` the best of the plans that offload; `offmate_preprint` the same with three
            options per block and whole-block offload, to compare with.
        slots: memory slots of RK-Rotor.
        device, device_fingerprint, time_limit_s, seed: stated in the summary.
        below: the tier below the device, if the plan may use one.

    Raises:
        Infeasible: with the smallest budget for which a plan was found.
        TableError: options are missing.
    """
    program = program_of(trace, nodes)
    chain = Chain(blocks, nodes, options)
    race = _Race(program, chain, device_budget_bytes)
    everything = race.candidate("keep_all", [Execution(n.node, "keep") for n in nodes], polish=False)
    base = sum(s.nbytes for s in trace.storages if s.role != "temporary")
    shared = _shared_bytes(trace, nodes)
    labelled = race.candidate("keep_all", chain.executions(_once(chain)), polish=True)
    if labelled.time_s <= everything.time_s:
        everything = labelled
    plans: list[_Candidate] = []
    offloading: list[OffloadPlan] = []
    moving: list[OffloadPlan] = []
    smallest: list[Outcome] = []
    if not method.startswith("offmate"):
        plans, leanest = _in_memory(race, everything, base + shared, base, slots, method)
        smallest.append(program.replay(leanest.executions))
    fitting = [p for p in plans if p.peak_bytes <= device_budget_bytes]
    if below is not None and method != "rockmate":
        offloader = Offloader(program, chain, below)
        settings = SolverSettings(time_limit_s=OFFMATE_SECONDS, gap=OFFMATE_GAP, seed=seed)
        preprint = method == "offmate_preprint"
        offloading = list(search.plans(offloader, device_budget_bytes, settings, preprint=preprint))
        fastest = min((p.time_s for p in fitting), default=math.inf)
        moving = list(_shifted(offloader, offloading, device_budget_bytes, fastest))
        if not preprint and not any(p.outcome.time_s <= p.fractional_s * POOR for p in moving):
            policies = list(offloader.fixed())
            offloading += policies
            moving += _shifted(offloader, policies, device_budget_bytes, fastest)
    least = min(smallest + [p.outcome for p in offloading], key=lambda o: o.peak_bytes, default=None)
    if least is None:
        least = program.replay(_in_memory(race, everything, base + shared, base, slots, method)[1].executions)
    if not fitting and not moving:
        raise Infeasible(
            budget_bytes=device_budget_bytes,
            smallest_feasible_bytes=least.peak_bytes,
            binding_step=least.rows[least.peak_row].step,
            occupants=least.occupants,
        )
    best = min(fitting, key=lambda p: (p.time_s, p.method != "keep_all", p.peak_bytes), default=None)
    moved = min(moving, key=lambda p: (p.outcome.time_s, p.outcome.peak_bytes), default=None)
    tiered: list[Slot] = []
    if moved is not None and (best is None or moved.outcome.time_s < best.time_s):
        found, outcome = moved.method, moved.outcome
        fractional_s, rates_bound_s = moved.fractional_s, moved.rates_bound_s
        tiered = slots_of(trace, moved.steps, moved.state)
    else:
        assert best is not None
        found, outcome = best.method, program.replay(best.executions)
        fractional_s = rates_bound_s = 0.0
    if outcome.peak_bytes > device_budget_bytes:
        raise AssertionError(f"the referee found a peak of {outcome.peak_bytes} in the plan of {found}")
    summary = _summary(trace, nodes, options, outcome, found, everything, least.peak_bytes)
    return Solved(
        outcome.rows,
        replace(
            summary,
            plan_hash=plan_hash(outcome.rows, trace.meta.configuration_hash, device_budget_bytes),
            device_budget_bytes=device_budget_bytes,
            device=device,
            device_fingerprint=device_fingerprint,
            time_limit_s=time_limit_s,
            seed=seed,
            fractional_time_s=fractional_s,
            rates_bound_s=rates_bound_s,
        ),
        tiered,
    )


def _in_memory(
    race: _Race, everything: _Candidate, overhead_bytes: int, base_bytes: int, slots: int, method: str
) -> tuple[list[_Candidate], _Candidate]:
    """Plans without the tier below, and the one that takes least memory.

    Args:
        race: with the budget.
        everything: the plan that keeps everything.
        overhead_bytes: in memory besides what RK-Rotor counts; `base_bytes` of it all the time.
        slots, method: see `solve_plan`.
    """
    chain, budget_bytes = race.chain, race.budget_bytes
    smallest = race.smallest(max(everything.peak_bytes - base_bytes, 1), slots) or everything
    fixed = {name: chain.executions(steps) for name, steps in fixed_policies(chain.chain_blocks).items()}
    policies = [race.candidate(name, executions, polish=False) for name, executions in fixed.items()]
    smallest = min([smallest, everything, *policies], key=lambda p: (p.peak_bytes, p.time_s))
    smallest = race.below(smallest, overhead_bytes, slots)
    plans: list[_Candidate] = [race.candidate("rockmate", smallest.executions, polish=True)]
    if method == "auto":
        plans.append(everything)
    if method != "auto" or everything.peak_bytes > budget_bytes:
        plans += race.rockmate(max(budget_bytes - overhead_bytes, 1), slots)
        if method == "auto":
            plans += [race.candidate(name, executions, polish=True) for name, executions in fixed.items()]
    return plans, smallest


def _shifted(
    offloader: Offloader, plans: Iterable[OffloadPlan], budget_bytes: int, fastest_s: float
) -> Iterator[OffloadPlan]:
    """The plans that fit with their copies hidden, but for those that computing alone makes slower than another."""
    fitting = [p for p in plans if p.outcome.peak_bytes <= budget_bytes]
    for plan in sorted(fitting, key=lambda p: p.outcome.time_s - p.outcome.wait_s):
        if plan.outcome.time_s - plan.outcome.wait_s >= fastest_s * (1 + _SAME):
            return
        found = offloader.shifted(plan, budget_bytes)
        fastest_s = min(fastest_s, found.outcome.time_s)
        yield found


def lower_bound_s(nodes: Iterable[ComputeNode], below: Below | None) -> float:
    """Every node once; updates only where the CPU cannot take them over."""
    beside = below is not None and below.cpu_update_bytes_per_s > 0
    return sum(n.time_s for n in nodes if not (beside and n.phase == "update"))


def _once(chain: Chain) -> list[ChainStep]:
    """Every block once, with its fastest option."""
    blocks = chain.chain_blocks
    fastest = [min(range(len(b.options)), key=lambda o: (b.options[o].time_s, b.options[o].save_bytes)) for b in blocks]
    forward = [ChainStep("forward", b, o) for b, o in enumerate(fastest)]
    return forward + [ChainStep("backward", b, fastest[b]) for b in reversed(range(len(blocks)))]


def _shared_bytes(trace: TraceTables, nodes: Sequence[ComputeNode]) -> int:
    made = {s for n in nodes if n.block == SHARED for s in n.creates}
    read = {s for n in nodes if n.block != SHARED for s in n.reads}
    return sum(trace.storages[s].nbytes for s in made & read)


def plan_hash(rows: Iterable[PlanRow], configuration: str, budget: int) -> str:
    """The name of a plan."""
    content = ",".join(f"{r.action[0]}{r.node}.{r.storage}" for r in rows)
    return hashlib.sha256(f"{configuration};{budget};{content}".encode()).hexdigest()[:16]


def _summary(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    options: Sequence[Option],
    outcome: Outcome,
    method: str,
    everything: _Candidate,
    smallest_feasible_bytes: int,
) -> PlanSummary:
    """What the plan states about itself, what the caller knows left blank."""
    worst = max(options, key=lambda o: o.gap)
    gap = 1 - outcome.once_time_s / outcome.time_s
    return PlanSummary(
        plan_hash="",
        configuration_hash=trace.meta.configuration_hash,
        method=method,
        device="",
        device_budget_bytes=0,
        device_peak_bytes=outcome.peak_bytes,
        baseline_bytes=outcome.baseline_bytes,
        step_time_s=outcome.time_s,
        lower_bound_s=outcome.once_time_s,
        recomputed_bytes=outcome.recomputed_bytes,
        activation_bytes=outcome.activation_bytes,
        keep_all_peak_bytes=everything.peak_bytes,
        keep_all_time_s=everything.time_s,
        smallest_feasible_bytes=smallest_feasible_bytes,
        solver=", ".join(sorted({o.formulation for o in options})),
        status="optimal" if gap < 1e-9 else worst.status,
        gap=max(gap, 0.0),
        time_limit_s=0.0,
        seed=0,
        estimated_nodes=sum(n.estimated for n in nodes),
        below_bytes=outcome.below_bytes,
        offload_bytes=outcome.offload_bytes,
        reload_bytes=outcome.reload_bytes,
        wait_s=outcome.wait_s,
        disk_bytes=outcome.disk_bytes,
    )
