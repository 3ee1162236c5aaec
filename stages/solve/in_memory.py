"""Plans without the tier below: RK-Rotor, looked at through finer and finer slots, against the fixed policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from stowage.stages.formulations.chain.policies import fixed_policies
from stowage.stages.formulations.chain.rk_rotor import HEADROOM, ChainStep, RkRotor
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.graph import SHARED
from stowage.stages.solve.known import Known
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.program import Program
from stowage.stages.solve.request import COMPARED, FIXED

CANDIDATES = 12
"""How many of RK-Rotor's plans that fit are polished and compared."""

STRIDE = 8
"""Most plans beyond the budget do not fit: so many at a time are passed over until one does."""

ORDERS = 6
"""Orders of executions, from much memory to little, that a sweep offloads from."""


@dataclass(frozen=True)
class Candidate:
    """A plan without the tier below.

    Attributes:
        method: how it was found.
        executions: in order.
        time_s, peak_bytes: of it.
    """

    method: str
    executions: list[Execution]
    time_s: float
    peak_bytes: int


class Race:
    """Makes candidates and keeps what the budget admits."""

    def __init__(
        self,
        program: Program,
        chain: Chain,
        budget_bytes: int,
        *,
        polishes: bool = True,
        known: Known | None = None,
    ) -> None:
        """Take part in a race.

        Args:
            program, chain: of the step.
            budget_bytes: of the device.
            polishes: keep what still fits instead of making it again.
            known: what races of the same program and chain within other budgets have found.
        """
        self.program = program
        self.chain = chain
        self.budget_bytes = budget_bytes
        self.polishes = polishes
        self.known = known if known is not None else Known()

    def candidate(self, method: str, executions: list[Execution]) -> Candidate:
        """A plan that runs no more than it must."""
        return self._judged(method, self.program.without_dead(executions))

    def polished(self, plan: Candidate) -> Candidate:
        """The plan, with what still fits kept instead of made again."""
        if not self.polishes or plan.peak_bytes > self.budget_bytes:
            return plan
        kept = self.program.retain_where_possible(plan.executions, self.budget_bytes)
        return plan if kept is plan.executions else self._judged(plan.method, kept)

    def _judged(self, method: str, executions: list[Execution]) -> Candidate:
        time_s = sum(self.program.nodes[e.node].time_s for e in executions)
        return Candidate(method, executions, time_s, self.program.peak_bytes(executions))

    def table(self, nominal_bytes: int, slots: int) -> RkRotor:
        return RkRotor(self.chain.chain_blocks, slots, max(1, -(-nominal_bytes // slots)))

    def rockmate(self, available_bytes: int, slots: int, *, polish: bool = True) -> Iterator[Candidate]:
        """RK-Rotor's plans that truly fit, one per distinct time, from the largest nominal memory down."""
        table = self.table(int(available_bytes * HEADROOM), slots)
        smallest = table.smallest_slots()
        if smallest is None:
            return
        levels = [m for m in range(slots, smallest - 1, -1) if m == slots or table.time_s(m) != table.time_s(m + 1)]

        @cache
        def plan(level: int) -> Candidate:
            return self.candidate("rockmate", self.chain.executions(table.sequence(levels[level])))

        def fits(level: int) -> bool:
            return plan(level).peak_bytes <= self.budget_bytes

        coarse = next((k for k in range(0, len(levels), STRIDE) if fits(k)), 0)
        fitting = (k for k in range(max(0, coarse - STRIDE + 1), len(levels)) if fits(k))
        for level in islice(fitting, CANDIDATES):
            yield self.polished(plan(level)) if polish else plan(level)

    def smallest(self, nominal_bytes: int, slots: int) -> Candidate | None:
        """The plan with the lowest true peak among RK-Rotor's tightest, looked at through ever finer slots."""
        return self.known.once(("smallest", nominal_bytes, slots), lambda: self._smallest(nominal_bytes, slots))

    def _smallest(self, nominal_bytes: int, slots: int) -> Candidate | None:
        best: Candidate | None = None
        for _ in range(3):
            table = self.table(nominal_bytes, slots)
            least = table.smallest_slots()
            if least is None:
                break
            for m in range(least, min(least + 4, slots) + 1):
                plan = self.candidate("rockmate", self.chain.executions(table.sequence(m)))
                if best is None or (plan.peak_bytes, plan.time_s) < (best.peak_bytes, best.time_s):
                    best = plan
            nominal_bytes = (least + 1) * table.slot_bytes
        return best

    def below(self, smallest: Candidate, overhead_bytes: int, slots: int) -> Candidate:
        """The plan from which the race, asked for one byte less than its peak, finds nothing any more.

        Args:
            smallest: where to start.
            overhead_bytes: in memory besides what RK-Rotor counts.
        """
        found: Candidate = self.known.of(
            smallest, f"below {overhead_bytes} {slots}", lambda plan: self._below(plan, overhead_bytes, slots)
        )
        return found

    def _below(self, smallest: Candidate, overhead_bytes: int, slots: int) -> Candidate:
        while True:
            race = Race(self.program, self.chain, smallest.peak_bytes - 1, polishes=self.polishes)
            found = list(race.rockmate(max(race.budget_bytes - overhead_bytes, 1), slots, polish=False))
            if not found:
                return smallest
            smallest = min(found, key=lambda p: (p.peak_bytes, p.time_s))


def keep_everything(race: Race) -> Candidate:
    """The plan that computes nothing again: in eager's order, or block by block if that is no slower."""
    everything = race.known.once(
        "everything", lambda: race.candidate("keep_all", [Execution(n.node, "keep") for n in race.program.nodes])
    )
    labelled = race.polished(
        race.known.once("by block", lambda: race.candidate("keep_all", race.chain.executions(_once(race.chain))))
    )
    return labelled if labelled.time_s <= everything.time_s else everything


def in_memory(race: Race, everything: Candidate, slots: int, method: str) -> tuple[list[Candidate], Candidate]:
    """Plans without the tier below, and the one that takes least memory.

    Args:
        race: with the budget.
        everything: the plan that keeps everything.
        slots, method: see `PlanRequest`.
    """
    budget_bytes, base_bytes = race.budget_bytes, race.program.base_bytes
    overhead_bytes = base_bytes + race.known.once(
        "uncounted", lambda: _uncounted_bytes(race)
    )  # in memory besides what RK-Rotor counts
    smallest = race.smallest(max(everything.peak_bytes - base_bytes, 1), slots) or everything
    policies = race.known.once("policies", lambda: _policies(race))
    if method in FIXED:
        found = [p for p in policies if p.method == method]
        if not found:
            raise ParameterError(f"method {method} needs a chain of two blocks at least, each of which may run again.")
        return found, found[0]
    known = [everything, *policies] if method not in COMPARED else []
    smallest = min([smallest, *known], key=lambda p: (p.peak_bytes, p.time_s))
    smallest = race.below(smallest, overhead_bytes, slots)
    plans: list[Candidate] = [race.polished(replace(smallest, method="rockmate"))]
    if method == "auto":
        plans.append(everything)
    if method != "auto" or everything.peak_bytes > budget_bytes:
        plans += race.rockmate(max(budget_bytes - overhead_bytes, 1), slots)
        if method == "auto":
            plans += [race.polished(policy) for policy in policies]
    return plans, smallest


def orders(race: Race, everything: Candidate, slots: int) -> Iterator[list[Execution]]:
    """Executions that a sweep may offload from: nothing computed again, and RK-Rotor's for less and less memory."""
    yield everything.executions
    table = race.table(max(everything.peak_bytes - race.program.base_bytes, 1), slots)
    least = table.smallest_slots()
    if least is None:
        return
    previous = everything.time_s
    for k in range(ORDERS):
        m = slots - (slots - least) * (k + 1) // ORDERS
        if table.time_s(m) > previous:
            previous = table.time_s(m)
            yield race.program.without_dead(race.chain.executions(table.sequence(m)))


def _policies(race: Race) -> list[Candidate]:
    """The fixed policies, unpolished."""
    fixed = fixed_policies(race.chain.chain_blocks)
    return [race.candidate(name, race.chain.executions(steps)) for name, steps in fixed.items()]


def _once(chain: Chain) -> list[ChainStep]:
    """Every block once, with its fastest option."""
    blocks = chain.chain_blocks
    fastest = [min(range(len(b.options)), key=lambda o: (b.options[o].time_s, b.options[o].save_bytes)) for b in blocks]
    forward = [ChainStep("forward", b, o) for b, o in enumerate(fastest)]
    return forward + [ChainStep("backward", b, fastest[b]) for b in reversed(range(len(blocks)))]


def _uncounted_bytes(race: Race) -> int:
    """What is outside the chain (masks, positions), and what blocks hold for others."""
    program = race.program
    made = {s for n in program.nodes if n.block == SHARED for s in n.creates}
    read = {s for n in program.nodes if n.block != SHARED for s in n.reads}
    inside = {s for block in race.chain.blocks for s in block.storages}
    held = {s for n in program.nodes if n.block != SHARED for s in n.creates} - inside
    return sum(program.nbytes[s] for s in (made & read) | held)
