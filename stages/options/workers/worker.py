"""Solves tasks in a process: `python -m stowage.stages.options.workers.worker`, one JSON line in, one out.

Workers are plain child processes because `multiprocessing` would import the user's script again in every worker.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from stowage.stages.formulations.cluster.answer import Budgets, HAnswer
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.command import Parser
from stowage.stages.ir.encoding import decode, encode
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options.clusters.tasks import Ends, HSolved, HTasks
from stowage.stages.options.tasks import Found, Grid, GridSize, greedy_frontier, grid, row
from stowage.stages.solver.outcome import SolverSettings

Request = dict[str, Any]

H_GRAPH, ENDS, SOLVED = TypeAdapter(HGraph), TypeAdapter(Ends), TypeAdapter(HSolved)
BUDGETS, ANSWERS = TypeAdapter(Budgets), TypeAdapter(list[HAnswer])


def grid_request(graph: BlockGraph, size: GridSize, settings: SolverSettings) -> Request:
    """Ask for `tasks.grid`."""
    return {"task": "grid", "graph": graph.to_json(), "size": asdict(size), "settings": asdict(settings)}


def row_request(graph: BlockGraph, budgets: Grid, peak: int, size: GridSize, settings: SolverSettings) -> Request:
    """Ask for `tasks.row`."""
    what = {"peak": peak, "saves": budgets.saves, "smallest": budgets.smallest}
    return {**grid_request(graph, size, settings), **what, "task": "row"}


def greedy_frontier_request(graph: BlockGraph, size: GridSize, settings: SolverSettings) -> Request:
    """Ask for `tasks.greedy_frontier`."""
    return {**grid_request(graph, size, settings), "task": "greedy_frontier"}


def h_ends_request(graph: HGraph, settings: SolverSettings, formulation: str) -> Request:
    """Ask for `HTasks.ends`."""
    return {
        "task": "h_ends",
        "graph": H_GRAPH.dump_json(graph).decode(),
        "settings": json.dumps(asdict(settings)),
        "formulation": formulation,
    }


def h_solve_request(
    graph: HGraph, settings: SolverSettings, formulation: str, budgets: Budgets, known: Sequence[HAnswer]
) -> Request:
    """Ask for `HTasks.solve`."""
    bare = [replace(answer, schedule=None) for answer in known]
    return {
        **h_ends_request(graph, settings, formulation),
        "task": "h_solve",
        "budgets": BUDGETS.dump_python(budgets, mode="json"),
        "known": ANSWERS.dump_python(bare, mode="json"),
    }


@lru_cache(maxsize=2)
def _h_tasks(graph: str, settings: str, formulation: str) -> HTasks:
    """Prepare an H-Graph once for all budgets that this process is asked for."""
    return HTasks(H_GRAPH.validate_json(graph), SolverSettings(**json.loads(settings)), formulation)


def perform(request: Request) -> dict[str, Any]:
    """Do one task; the answer is plain JSON, so that it is the same wherever it was done."""
    if request["task"] in {"h_ends", "h_solve"}:
        tasks = _h_tasks(request["graph"], request["settings"], request["formulation"])
        if request["task"] == "h_ends":
            return {"ends": ENDS.dump_python(tasks.ends(), mode="json")}
        known = ANSWERS.validate_python(request["known"])
        solved = tasks.solve(BUDGETS.validate_python(request["budgets"]), known)
        return {"solved": SOLVED.dump_python(solved, mode="json")}
    graph = BlockGraph.from_json(request["graph"])
    size, settings = GridSize(**request["size"]), SolverSettings(**request["settings"])
    if request["task"] == "grid":
        budgets = grid(graph, size, settings)
        numbers = {"peaks": budgets.peaks, "saves": budgets.saves, "smallest": budgets.smallest}
        return {**numbers, "found": [_pack(f) for f in budgets.found]}
    if request["task"] == "row":
        found = row(graph, request["peak"], request["saves"], size, settings, request["smallest"])
        return {"found": [_pack(f) for f in found]}
    return {"found": [_pack(f) for f in greedy_frontier(graph, size)]}


def unpack(answer: dict[str, Any]) -> list[Found]:
    """Read the schedules of an answer."""
    return [
        Found(BlockSchedule(decode(f["forward"]), decode(f["backward"])), SolveReport(**f["report"]))
        for f in answer["found"]
    ]


def unpack_ends(answer: dict[str, Any]) -> Ends:
    """Read the answer to `h_ends_request`."""
    return ENDS.validate_python(answer["ends"])


def unpack_solved(answer: dict[str, Any]) -> HSolved:
    """Read the answer to `h_solve_request`."""
    return SOLVED.validate_python(answer["solved"])


def unpack_grid(answer: dict[str, Any]) -> Grid:
    """Read the grid of an answer to `grid_request`."""
    smallest = tuple(tuple(stages) for stages in answer["smallest"])
    return Grid(tuple(answer["peaks"]), tuple(answer["saves"]), tuple(unpack(answer)), smallest)


def _pack(found: Found) -> dict[str, Any]:
    return {
        "forward": encode(found.schedule.forward),
        "backward": encode(found.schedule.backward),
        "report": asdict(found.report),
    }


def _receive(requests: queue.SimpleQueue[str]) -> None:
    """Pass requests on, and end the process with the input, even in the middle of a solve.

    Nobody waits for its answer then (the planner may have been killed).
    """
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def main() -> None:
    """Answer requests until the input ends; an error is an answer too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process quietly: the planner reports it
    requests = queue.SimpleQueue[str]()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    while True:
        try:
            answer = perform(json.loads(requests.get()))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    main()
