"""Holds a schedule that cuts have found, and lets the referee judge it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stowage.stages.formulations.cuts.step_graph import both_lanes_s
from stowage.stages.rewrite import Way
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import Decision, JudgedPlan, Proposal
from stowage.stages.solve.referee import Referee
from stowage.stages.solve.select import updated_together
from stowage.stages.solver.milp import milp_version

METHOD = "cuts"
"""The method of plans whose schedules cuts have found."""


@dataclass(frozen=True)
class Schedule:
    """A schedule that was found, with the way that it is of, and its program."""

    way: Way
    program: StepProgram
    executions: list[Execution]

    @cached_property
    def exchanges(self) -> bool:
        """Return whether ranks exchange something in it: then its time is for the referee to say."""
        return any(n.collective for n in self.way.nodes)

    @cached_property
    def least_s(self) -> float:
        """Return the least time that it may take: its time, if nothing is exchanged."""
        runs = [self.way.nodes[e.node] for e in self.executions]
        return both_lanes_s(
            sum(n.time_s for n in runs if not n.collective), sum(n.time_s for n in runs if n.collective)
        )

    def judged(self, budget_bytes: int, time_limit_s: float = 0.0) -> JudgedPlan:
        """Let the referee judge it, with its collectives beside computing as well as the budget allows.

        Args:
            budget_bytes: of the device.
            time_limit_s: of the solves that found it.
        """
        referee = Referee(self.program, budget_bytes)
        decision = Decision(f"{METHOD}, {milp_version()}", "feasible", None, time_limit_s)
        proposal = Proposal(method=METHOD, steps=self.program.steps(self.executions), decision=decision)
        plan = referee.hide(referee.judge(proposal))
        return updated_together(self.way.trace, self.way.nodes, plan, referee, budget_bytes)
