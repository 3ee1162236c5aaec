"""Solve one MILP with HiGHS in a process of its own: `python -m stowage.stages.solver.highs_child FOLDER`.

Why a process: the wheels of highspy and of OR-Tools each bring a `libhighs.so.1`, and whichever is loaded second finds
the other's, which lacks its symbols. One process can therefore hold one of them; ours holds OR-Tools.

Reads `model.mps` and `request.json`, writes `answer.json`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from stowage.stages.ir.command import Parser


def main(folder: Path) -> None:
    """Solve the model in `folder`."""
    import highspy

    request = json.loads((folder / "request.json").read_text())
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    for option, value in request["options"].items():
        model.setOptionValue(option, value)
    model.readModel(str(folder / "model.mps"))
    names = list(model.getLp().col_names_)
    start: dict[str, float] | None = request["start"]
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = [start.get(name, 0.0) for name in names]
        model.setSolution(solution)
    model.run()
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


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the model and what is asked")
    main(parser.parse_args().folder)
