"""Solves MILPs with HiGHS in a process of its own: `python -m stowage.stages.solver.highs_child`.

A process is needed because the wheels of highspy and of OR-Tools each bring a `libhighs.so.1`, and the one loaded
second finds the other's, which lacks its symbols. One process can therefore load one of them; Stowage's loads OR-Tools.

Each line of its input is a folder: it reads `model.mps` and `request.json` there, writes `answer.json`, and answers
`solved` or an error. It ends with its input, and after a while without a request.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from stowage.stages.ir.command import Parser
from stowage.stages.solver.highs_rounding import rounded

IDLE_S = 5.0


def main() -> None:
    """Solve the models in the folders that the input names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what the library prints out of the answers
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (line := sys.stdin.readline()):
        try:
            solve(Path(line.rstrip("\n")))
            said = "solved"
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
        answers.write(f"{said}\n")
        answers.flush()


def solve(folder: Path) -> None:
    """Solve the model in `folder`."""
    import highspy

    request = json.loads((folder / "request.json").read_text())
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    for option, value in request["options"].items():
        model.setOptionValue(option, value)
    model.readModel(str(folder / "model.mps"))
    names = list(model.getLp().col_names_)
    if request["choices"]:
        (folder / "answer.json").write_text(json.dumps(_rounded(model, names, request)))
        return
    start: dict[str, float] | None = request["start"]
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = [start.get(name, 0.0) for name in names]
        model.setSolution(solution)
    model.run()
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible and request["options"]["solver"] == "ipm":
        _run_again(model, request["options"]["time_limit"])
    info = model.getInfo()
    status = model.getModelStatus()
    found = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    bound = info.mip_dual_bound
    answer = {
        "optimal": status == highspy.HighsModelStatus.kOptimal,
        "infeasible": status == highspy.HighsModelStatus.kInfeasible,
        "objective": info.objective_function_value if found else None,
        "bound": bound if math.isfinite(bound) else None,
        "values": dict(zip(names, model.getSolution().col_value)) if found else {},
    }
    (folder / "answer.json").write_text(json.dumps(answer))


def _run_again(model: Any, limit_s: float) -> None:
    """Solve a linear program by the simplex method.

    Where its numbers are far apart, interior points may call a program infeasible that has answers, which would be
    taken for a proof.
    """
    model.clearSolver()
    model.setOptionValue("solver", "simplex")
    model.setOptionValue("time_limit", model.getRunTime() + limit_s)
    model.run()


def _rounded(model: Any, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of rounding, in the form of that of a solve."""
    column = {name: i for i, name in enumerate(names)}
    until_s = time.monotonic() + request["options"]["time_limit"]
    choices = [[column[name] for name in choice] for choice in request["choices"]]
    found = rounded(model, choices, request["kinds"], until_s)
    gap = request["options"]["mip_rel_gap"] * abs(found.objective)
    return {
        "optimal": bool(found.values) and found.bound is not None and found.objective - found.bound <= gap,
        "infeasible": False,
        "objective": found.objective if found.values else None,
        "bound": found.bound,
        "values": dict(zip(names, found.values)),
    }


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
