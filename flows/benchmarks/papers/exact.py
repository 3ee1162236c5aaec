"""Solves the exact program of O-ILP for the preprint's tasks: how large it is, how near to the optimum, how long.

It is the one that planning asks: in a long chain transfers happen near the use that they follow or serve.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stowage.flows.benchmarks.papers.machines import GIB, MACHINES, TABLE_2, PaperModel
from stowage.flows.benchmarks.papers.tables import EFFORT
from stowage.flows.planning.step import Planning, StepToPlan, cost_step
from stowage.stages.formulations.offload.o_ilp.equations import build
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.ir.exposure import exposed
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.offload.offmate.search import reach_of
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solver.outcome import SolverSettings

BUDGETS = (10 * GIB, 8 * GIB, 6 * GIB)
"""Budgets of each task, bytes."""

SETTINGS = SolverSettings(time_limit_s=60.0, gap=1e-3)
"""Limits of one solve."""


@dataclass(frozen=True)
class ExactRow:
    """One exact program.

    Attributes:
        machine, model: names of both.
        budget_bytes: the device's budget.
        variables, constraints: how many the program has.
        status: the solver's word.
        step_s, bound_s: time of the best plan in fractions, and what no plan is below; 0 without a plan.
        seconds: time to solve it; solvers have one thread.
    """

    machine: str
    model: str
    budget_bytes: int
    variables: int
    constraints: int
    status: str
    step_s: float
    bound_s: float
    seconds: float

    @property
    def gap(self) -> float:
        """Return what the bound lacks of the plan's time, as a share."""
        return 1 - self.bound_s / self.step_s if self.step_s else 1.0


def exact_rows(
    say: Callable[[str], None], models: Sequence[PaperModel] = TABLE_2, budgets: Sequence[int] = BUDGETS
) -> Iterator[ExactRow]:
    """Solve each task's program within each budget."""
    with tempfile.TemporaryDirectory() as store:
        for model in models:
            problem = _problem_of(model, Path(store))
            for budget in budgets:
                row = _solved(model, problem, budget)
                say(
                    f"{row.machine}, {row.model}, {budget / GIB:g} GiB: {row.variables:,} variables, "
                    f"{row.constraints:,} rows; {row.status}, {row.step_s:.2f} s, within {row.gap:.2%}, "
                    f"after {row.seconds:.1f} s"
                )
                yield row


def _problem_of(paper: PaperModel, store: Path) -> ChainProblem:
    machine = MACHINES[paper.machine]
    model, batch, layouts = paper.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    target = machine.device_for(paper.dtype)
    how = Planning(stores=store, effort=EFFORT, costs="roofline", target=target, lower_tier=machine.lower_tier)
    costed = cost_step(StepToPlan(model=model, batch=batch, optimizer=optimizer, layouts=layouts), how)
    variant = costed.variants[0]
    hashes = {b.block_hash for b in variant.blocks}
    options = [o for o in costed.options_for("offmate", store, EFFORT) if o.block_hash in hashes]
    counted = exposed(variant.nodes)
    chain = Chain(variant.blocks, counted, options)
    offloader = Offloader(program_of(variant.trace, counted), chain, machine.lower_tier)
    return ChainProblem(offloader, choices_of(offloader))


def _solved(paper: PaperModel, chain: ChainProblem, budget_bytes: int) -> ExactRow:
    problem = chain.within(budget_bytes)
    limits = OIlpLimits(reach=reach_of(2 * len(problem.blocks)))
    program = build(problem, limits).model
    variables, constraints = len(program.variables()), len(program.constraints)
    began_s = time.perf_counter()
    answer = o_ilp(problem, SETTINGS, limits=limits)
    seconds = time.perf_counter() - began_s
    found_s = answer.solution.objective_s if answer.solution is not None else 0.0
    return ExactRow(
        paper.machine,
        paper.name,
        budget_bytes,
        variables,
        constraints,
        answer.status,
        found_s,
        answer.bound_s,
        seconds,
    )
