"""Solves MILPs through PuLP: with HiGHS by default, with CBC where HiGHS is missing or CBC is asked for.

Formulations take PuLP from here (`from stowage.stages.solver.milp import pulp`): PuLP loads highspy when it is
imported, after which OR-Tools cannot be (see `highs_child`), so OR-Tools has to be loaded first. Both are loaded when
PuLP is first used.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from stowage.stages.ir.files import writing
from stowage.stages.solver.cp import load_cp_model
from stowage.stages.solver.highs_process import solve_folder
from stowage.stages.solver.lazy import LazyModule
from stowage.stages.solver.outcome import SolverOutcome, SolverSettings, Status

__all__ = ["Choice", "MilpSolver", "highs_available", "milp_version", "pulp", "solve_milp"]


def _load_pulp() -> ModuleType:
    load_cp_model()
    return import_module("pulp")


pulp: Any = LazyModule(_load_pulp)

MilpSolver = Literal["highs", "cbc"]
# Seconds beyond the time limit, for reading and writing the model, before the child is killed.
_GRACE_S = 60.0


@dataclass(frozen=True)
class Choice:
    """Integer variables of which exactly one is 1.

    Attributes:
        variables: one for each option.
        kind: a number, equal where the same options of two choices mean the same.
    """

    variables: Sequence[Any]
    kind: int


def solve_milp(
    problem: Any,
    settings: SolverSettings,
    *,
    solver: MilpSolver = "highs",
    warm_start: bool = False,
    interior_points: bool = False,
    choices: Sequence[Choice] = (),
) -> SolverOutcome:
    """Minimise a `pulp.LpProblem`; the answer is left in its variables.

    HiGHS and CBC count wall time only: an answer at the time limit may differ from run to run, an optimal one does not.

    Args:
        problem: the problem.
        settings: limits of the solver.
        solver: "highs" or "cbc".
        warm_start: take the variables' initial values (`setInitialValue`) as the first incumbent.
        interior_points: have HiGHS solve the first relaxation by interior points, not by the simplex method.
        choices: the integer variables, where each is of a choice: have HiGHS round the relaxation choice by choice (see
            `highs_rounding`), whose optimum is the bound, and do not search.
    """
    started = time.perf_counter()
    if solver == "highs" and highs_available():
        status, objective, bound = _solve_highs(problem, settings, warm_start, interior_points, choices)
        name = milp_version("highs")
    else:
        status, objective, bound = _solve_cbc(problem, settings, warm_start)
        name = milp_version("cbc")
    return SolverOutcome(status, objective, bound, name, time.perf_counter() - started)


@cache
def milp_version(solver: MilpSolver = "highs") -> str:
    """Return name and version, for reports and for keys of stored solutions."""
    if solver == "highs" and highs_available():
        return f"HiGHS {version('highspy')} (PuLP {version('pulp')})"
    return f"CBC (PuLP {version('pulp')})"


@cache
def highs_available() -> bool:
    """Say whether highspy is installed."""
    try:
        version("highspy")
    except PackageNotFoundError:
        return False
    return True


def _solve_highs(
    problem: Any,
    settings: SolverSettings,
    warm_start: bool,
    interior_points: bool,
    choices: Sequence[Choice],
) -> tuple[Status, float, float]:
    request = {
        "options": {
            "time_limit": float(settings.time_limit_s),
            "mip_rel_gap": float(settings.gap),
            "threads": settings.threads,
            "random_seed": settings.seed,
            # Long sparse linear programs, the only ones here without integers, take several times as long with the
            # simplex method; for mixed ones the solver may choose.
            "solver": "choose" if problem.isMIP() else "ipm",
            **({"mip_lp_solver": "ipm"} if interior_points and problem.isMIP() else {}),
        },
        "choices": [[variable.name for variable in choice.variables] for choice in choices],
        "kinds": [choice.kind for choice in choices],
        "start": {v.name: v.varValue or 0.0 for v in problem.variables()} if warm_start else None,
    }
    with tempfile.TemporaryDirectory(prefix="stowage-highs-") as name:
        folder = Path(name)
        with writing(folder):
            problem.writeMPS(str(folder / "model.mps"))
            (folder / "request.json").write_text(json.dumps(request))
        if not solve_folder(folder, settings.time_limit_s + _GRACE_S):
            return "unknown", math.inf, -math.inf
        answer = json.loads((folder / "answer.json").read_text())
    bound = -math.inf if answer["bound"] is None else float(answer["bound"])
    if answer["infeasible"]:
        return "infeasible", math.inf, math.inf
    if answer["objective"] is None:
        return "unknown", math.inf, bound
    for variable in problem.variables():
        value = answer["values"].get(variable.name, 0.0)
        variable.varValue = round(value) if variable.cat == pulp.LpInteger else value
    objective = float(answer["objective"])
    return "optimal" if answer["optimal"] else "feasible", objective, min(objective, bound)


def _solve_cbc(problem: Any, settings: SolverSettings, warm_start: bool) -> tuple[Status, float, float]:
    with tempfile.TemporaryDirectory(prefix="stowage-cbc-") as folder:
        log = Path(folder) / "cbc.log"
        command = pulp.PULP_CBC_CMD(
            msg=False,
            timeLimit=settings.time_limit_s,
            gapRel=settings.gap,
            threads=None if settings.threads == 1 else settings.threads,
            warmStart=warm_start,
            options=[f"randomCbcSeed {settings.seed + 1}", f"randomSeed {settings.seed + 1}"],
            logPath=str(log),
        )
        problem.solve(command)
        text = log.read_text() if log.exists() else ""
    if problem.status == pulp.LpStatusInfeasible:
        return "infeasible", math.inf, math.inf
    bounds = re.findall(r"(?:Lower bound|best possible)[: ]+([-+.\deE]+)", text)
    bound = float(bounds[-1]) if bounds else -math.inf
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return "unknown", math.inf, bound
    objective = float(pulp.value(problem.objective) or 0.0)
    if problem.sol_status == pulp.LpSolutionOptimal:
        return "optimal", objective, objective * (1.0 - settings.gap)
    return "feasible", objective, min(objective, bound)
