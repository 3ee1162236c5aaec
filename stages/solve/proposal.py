"""Describes what makers of plans propose, and what the referee makes of it.

A maker of plans is a `Source`. It yields proposals one by one and is sent the verdict on each, so that it may look at
what the referee found before it proposes more:

    verdict = yield Proposal(method="stream_0_0", steps=steps, ...)
    if verdict is not None and verdict.fits(budget_bytes): ...
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, TierState
from stowage.stages.ir.step import Step
from stowage.stages.simulate.plan import Outcome
from stowage.stages.solve.known import Known
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.request import PlanRequest


@dataclass(frozen=True)
class Decision:
    """Who decided a plan, and what is proven of the decision.

    Attributes:
        solver: name and version of a solver; or the rules and the formulations of the options that made the plan.
        status: `optimal` or `feasible` as a solver says; `heuristic` where a rule decided.
        gap: distance to the optimum that the solver proved; None where only the lower bound of the step is known.
        time_limit_s, seed: of one solve; 0 where no solver decided.
    """

    solver: str
    status: str = "heuristic"
    gap: float | None = None
    time_limit_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan that nobody has judged yet.

    Attributes:
        method: how it was made.
        steps: its rows, not timed yet.
        decision: who decided it.
        tier: the tier that it uses; None where everything stays on the device.
        state: where persistent storages are when every iteration starts and ends.
        wanted_on_disk: storages that should be placed on the disk behind the host rather than in the host.
        hide_at_once: its source needs its time with transfers hidden as well as the budget allows.
        only_bound: it only tells the smallest budget that works, and is not to be chosen.
        baseline: nothing that is chosen may be slower, by however little, if it fits.
        fractional_s: the time that O-ILP counts for its fractions; 0 where no fractions were rounded.
        rates_bound_s: the lower bound from the rates of the tiers; 0 where no fractions were rounded.
    """

    method: str
    steps: Sequence[Step]
    decision: Decision
    tier: LowerTier | None = None
    state: TierState = EVERYTHING_ON_DEVICE
    wanted_on_disk: frozenset[int] = frozenset()
    hide_at_once: bool = False
    only_bound: bool = False
    baseline: bool = False
    fractional_s: float = 0.0
    rates_bound_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JudgedPlan(Proposal):
    """A plan that the referee accepted.

    Attributes:
        outcome: what the referee says of it.
        hidden: whether its transfers are hidden as well as the budget allows.
    """

    outcome: Outcome
    hidden: bool = False

    @property
    def time_s(self) -> float:
        """Return the time of one iteration."""
        return self.outcome.time_s

    @property
    def peak_bytes(self) -> int:
        """Return the highest device bytes."""
        return self.outcome.peak_bytes

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that one iteration transfers, both ways."""
        return self.outcome.offload_bytes + self.outcome.reload_bytes


@dataclass(frozen=True)
class Task:
    """Says what every source plans.

    Attributes:
        program, chain: the step, and its blocks with their options.
        request: what is asked for.
        known: what was found of the same step within other budgets.
    """

    program: StepProgram
    chain: Chain
    request: PlanRequest
    known: Known = field(default_factory=Known)

    @property
    def budget_bytes(self) -> int:
        """Return the device bytes that a plan may use."""
        return self.request.device_budget_bytes


Proposals = Generator[Proposal, JudgedPlan | None, None]
"""Proposals, each of which is answered by the judged plan, or by None where the referee refuses."""


class Source(Protocol):
    """Makes plans for a task."""

    def propose(self, task: Task) -> Proposals:
        """Propose plans for a task, best ideas first."""
        ...
