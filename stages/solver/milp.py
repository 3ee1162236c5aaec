"""The door to MILP solvers, through PuLP: HiGHS by default, CBC where HiGHS is missing or asked for."""

from __future__ import annotations

import math
import re
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import pulp

from stowage.stages.solver.outcome import SolverOutcome, SolverSettings, Status

MilpSolver = Literal["highs", "cbc"]


def solve_milp(
    problem: Any,
    settings: SolverSettings,
    *,
    solver: MilpSolver = "highs",
    warm_start: bool = False,
) -> SolverOutcome:
    """Minimise a `pulp.LpProblem`; the answer is left in its variables.

    With `warm_start` the variables' initial values (`setInitialValue`) are the first incumbent.
    """
    if solver == "highs" and not _highs_available():
        solver = "cbc"
    started = time.perf_counter()
    outcome = _solve_highs if solver == "highs" else _solve_cbc
    status, objective, bound = outcome(problem, settings, warm_start)
    return SolverOutcome(status, objective, bound, milp_version(solver), time.perf_counter() - started)


def milp_version(solver: MilpSolver = "highs") -> str:
    """Name and version, for reports and for keys of stored solutions."""
    if solver == "highs" and _highs_available():
        return f"HiGHS {version('highspy')} (PuLP {version('pulp')})"
    return f"CBC (PuLP {version('pulp')})"


def _highs_available() -> bool:
    try:
        version("highspy")
    except PackageNotFoundError:
        return False
    return True


def _solve_highs(problem: Any, settings: SolverSettings, warm_start: bool) -> tuple[Status, float, float]:
    command = pulp.HiGHS(
        msg=False,
        timeLimit=settings.time_limit_s,
        gapRel=settings.gap,
        threads=settings.threads,
        warmStart=warm_start,
        random_seed=settings.seed,
    )
    problem.solve(command)
    info = problem.solverModel.getInfo()
    has_answer = math.isfinite(info.objective_function_value) and info.primal_solution_status == 2
    return _judge(problem, has_answer, info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else -math.inf)


def _solve_cbc(problem: Any, settings: SolverSettings, warm_start: bool) -> tuple[Status, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cbc.log"
        command = pulp.PULP_CBC_CMD(
            msg=False,
            timeLimit=settings.time_limit_s,
            gapRel=settings.gap,
            threads=None if settings.threads == 1 else settings.threads,
            warmStart=warm_start,
            options=[f"randomCbcSeed {settings.seed + 1}", f"randomSeed {settings.seed + 1}"],
            logPath=str(log),
            keepFiles=False,
        )
        problem.solve(command)
        text = log.read_text() if log.exists() else ""
    bounds = re.findall(r"(?:Lower bound|best possible)[: ]+([-+.\deE]+)", text)
    has_answer = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    return _judge(problem, has_answer, float(bounds[-1]) if bounds else -math.inf)


def _judge(problem: Any, has_answer: bool, bound: float) -> tuple[Status, float, float]:
    if problem.status == pulp.LpStatusInfeasible:
        return "infeasible", math.inf, math.inf
    if not has_answer:
        return "unknown", math.inf, bound
    objective = float(pulp.value(problem.objective) or 0.0)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal", objective, min(objective, bound) if math.isfinite(bound) else objective
    return "feasible", objective, min(objective, bound)
