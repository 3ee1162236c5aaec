"""Proposals as the referee judges them."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from stowage.stages.simulate.plan import Outcome
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import JudgedPlan, Proposal
from stowage.stages.solve.referee import Referee

PLENTY = 1 << 60


def judged(
    program: StepProgram, proposals: Generator[Proposal, JudgedPlan | None, object], budget: int = PLENTY
) -> list[JudgedPlan]:
    """What is proposed and accepted."""
    return list(Referee(program, budget).listen(proposals))


def hidden(program: StepProgram, plan: JudgedPlan, budget: int) -> JudgedPlan:
    """The plan with its copies hidden."""
    return Referee(program, budget).hide(plan)


def replayed(program: StepProgram, executions: Sequence[Execution]) -> Outcome:
    """What the referee says of executions that keep everything on the device."""
    return Referee(program, PLENTY).outcome(program.steps(executions))
