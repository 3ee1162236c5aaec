"""The door to solvers: statuses, bounds, warm starts, and two wheels that cannot share a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stowage.stages.solver import milp
from stowage.stages.solver.cp import cp_model, cp_version, solve_cp
from stowage.stages.solver.highs_process import HighsProcess, solve_folder
from stowage.stages.solver.milp import MilpSolver, milp_version, pulp, solve_milp
from stowage.stages.solver.outcome import SolverSettings


def knapsack() -> tuple[object, list[object]]:
    """Cover 10 with 3, 4, 5 and 6 at costs 3, 5, 6 and 8: 9 by 4 + 6 ... 3 + 5 + 4 costs 14, 4 + 6 costs 13."""
    problem = pulp.LpProblem("cover", pulp.LpMinimize)
    x = [pulp.LpVariable(f"x{i}", cat=pulp.LpBinary) for i in range(4)]
    problem += 3 * x[0] + 5 * x[1] + 6 * x[2] + 8 * x[3]
    problem += 3 * x[0] + 4 * x[1] + 5 * x[2] + 6 * x[3] >= 10, "cover"
    return problem, x


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_milp(solver: MilpSolver) -> None:
    problem, x = knapsack()
    outcome = solve_milp(problem, SolverSettings(), solver=solver)
    assert outcome.status == "optimal"
    assert outcome.objective == 13
    assert outcome.bound == pytest.approx(13)
    assert outcome.gap == pytest.approx(0)
    assert outcome.solver == milp_version(solver)
    assert [v.varValue for v in x] == [0, 1, 0, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_milp_warm_start(solver: MilpSolver) -> None:
    problem, x = knapsack()
    for v, value in zip(x, (1, 1, 1, 0)):
        v.setInitialValue(value)  # type: ignore[attr-defined]
    assert solve_milp(problem, SolverSettings(), solver=solver, warm_start=True).objective == 13


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_milp_infeasible(solver: MilpSolver) -> None:
    problem, x = knapsack()
    problem += x[1] + x[2] + x[3] <= 0  # type: ignore[operator]
    outcome = solve_milp(problem, SolverSettings(), solver=solver)
    assert outcome.status == "infeasible"
    assert not outcome.found


def test_what_interior_points_call_infeasible_is_asked_again(tmp_path: Path) -> None:
    """A relaxation whose link is a thousand times slower than computing: its numbers are far apart."""
    shutil.copy(Path(__file__).with_name("far_apart.mps"), tmp_path / "model.mps")
    options = {"solver": "ipm", "time_limit": 60.0, "threads": 1}
    request = {"options": options, "choices": [], "kinds": [], "start": None}
    (tmp_path / "request.json").write_text(json.dumps(request))
    assert solve_folder(tmp_path, 60.0)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["optimal"]
    assert answer["objective"] == pytest.approx(4319998.57)


def test_one_process_solves_one_model_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Counted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    process = HighsProcess()
    monkeypatch.setattr(milp, "solve_folder", process.solve)
    problem, _ = knapsack()
    for _ in range(3):
        assert solve_milp(problem, SolverSettings()).objective == 13
    assert len(started) == 1
    os.kill(started[0], signal.SIGKILL)
    assert solve_milp(problem, SolverSettings()).objective == 13, "one that is gone is started again"
    assert len(started) == 2
    process.stop()


def test_what_highs_cannot_read_is_said(tmp_path: Path) -> None:
    process = HighsProcess()
    with pytest.raises(RuntimeError, match="HiGHS failed: FileNotFoundError"):
        process.solve(tmp_path, 60.0)
    (tmp_path / "request.json").write_text("{")
    with pytest.raises(RuntimeError, match="HiGHS failed: JSONDecodeError"):
        process.solve(tmp_path, 60.0)
    process.stop()


def test_a_process_without_work_ends() -> None:
    """It waits for nobody: not for its input to end, and not for longer than a few seconds."""
    command = [sys.executable, "-m", "stowage.stages.solver.highs_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.wait(600) == 0
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=True).returncode == 0


def test_cp() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 10, "x")
    model.add(3 * x >= 10)
    model.minimize(x)
    answer = solve_cp(model, SolverSettings())
    assert answer.outcome.status == "optimal"
    assert answer.outcome.objective == answer.outcome.bound == answer.value(x) == 4
    assert answer.outcome.solver == cp_version()
    model.add(x <= 3)
    assert solve_cp(model, SolverSettings()).outcome.status == "infeasible"


def test_a_malformed_cp_model_is_an_error() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(-(1 << 62), 1 << 62, "x")
    model.add((1 << 40) * x <= 5)
    with pytest.raises(ValueError, match="CP-SAT rejects the model"):
        solve_cp(model, SolverSettings())


def test_pulp_before_or_tools_is_explained() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import highspy, stowage.stages.solver.cp as cp; cp.cp_model.CpModel"],
        capture_output=True,
        text=True,
        check=False,
    )
    # Should the wheels one day live together, `highs_child` can go.
    assert done.returncode == 1
    assert "take pulp from stowage.stages.solver.milp" in done.stderr


def test_solvers_are_loaded_when_they_are_used() -> None:
    code = (
        "import sys, stowage.flows.api.fit\n"
        "heavy = {'pulp', 'ortools', 'pandas', 'highspy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from stowage.stages.solver.milp import pulp\n"
        "pulp.LpProblem\n"
        "assert {'pulp', 'ortools'} <= set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
