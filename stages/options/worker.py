"""A process that solves tasks: `python -m stowage.stages.options.worker`, one JSON line in, one out.

Plain child processes rather than `multiprocessing`, which would import the user's script again in every worker.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.encoding import decode, encode
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options.h_tasks import HFound, explored
from stowage.stages.options.tasks import Found, Grid, GridSize, grid, row, sweep
from stowage.stages.solver.outcome import SolverSettings

Request = dict[str, Any]

H_GRAPH = TypeAdapter(HGraph)
H_FOUND = TypeAdapter(list[HFound])


def grid_request(graph: BlockGraph, size: GridSize, settings: SolverSettings) -> Request:
    """Ask for `tasks.grid`."""
    return {"task": "grid", "graph": graph.to_json(), "size": asdict(size), "settings": asdict(settings)}


def row_request(
    graph: BlockGraph, peak: int, saves: tuple[int, ...], size: GridSize, settings: SolverSettings
) -> Request:
    """Ask for `tasks.row`."""
    return {**grid_request(graph, size, settings), "task": "row", "peak": peak, "saves": list(saves)}


def sweep_request(graph: BlockGraph, size: GridSize, settings: SolverSettings) -> Request:
    """Ask for `tasks.sweep`."""
    return {**grid_request(graph, size, settings), "task": "sweep"}


def h_request(graph: HGraph, peaks: int, saves: int, settings: SolverSettings) -> Request:
    """Ask for `h_tasks.explored`."""
    return {
        "task": "h_graph",
        "graph": H_GRAPH.dump_python(graph, mode="json"),
        "peaks": peaks,
        "saves": saves,
        "settings": asdict(settings),
    }


def perform(request: Request) -> dict[str, Any]:
    """Do one task; the answer is plain JSON, so that it is the same wherever it was done."""
    if request["task"] == "h_graph":
        settings = SolverSettings(**request["settings"])
        found = explored(H_GRAPH.validate_python(request["graph"]), request["peaks"], request["saves"], settings)
        return {"found": H_FOUND.dump_python(found, mode="json")}
    graph = BlockGraph.from_json(request["graph"])
    size, settings = GridSize(**request["size"]), SolverSettings(**request["settings"])
    if request["task"] == "grid":
        budgets = grid(graph, size, settings)
        return {"peaks": budgets.peaks, "saves": budgets.saves, "found": [_pack(f) for f in budgets.found]}
    if request["task"] == "row":
        return {"found": [_pack(f) for f in row(graph, request["peak"], request["saves"], size, settings)]}
    return {"found": [_pack(f) for f in sweep(graph, size)]}


def unpack(answer: dict[str, Any]) -> list[Found]:
    """Schedules of an answer."""
    return [
        Found(BlockSchedule(decode(f["forward"]), decode(f["backward"])), SolveReport(**f["report"]))
        for f in answer["found"]
    ]


def unpack_h(answer: dict[str, Any]) -> list[HFound]:
    """Schedules of an answer to `h_request`."""
    return H_FOUND.validate_python(answer["found"])


def unpack_grid(answer: dict[str, Any]) -> Grid:
    """The grid of an answer to `grid_request`."""
    return Grid(tuple(answer["peaks"]), tuple(answer["saves"]), tuple(unpack(answer)))


def _pack(found: Found) -> dict[str, Any]:
    return {
        "forward": encode(found.schedule.forward),
        "backward": encode(found.schedule.backward),
        "report": asdict(found.report),
    }


def main() -> None:
    """Answer until the input ends; what goes wrong is an answer too."""
    for line in sys.stdin:
        try:
            answer = perform(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
