"""Runs one point of the rematerialization benchmark in a process of its own.

`python -m stowage.flows.benchmarks.remat.contestant`.

The first line says which model and what runs it; each further line is a number, the seed of one iteration, or a list of
one, to measure its peak. Forward and backward alone: gradients stay in `.grad`, as for the papers' numbers, so that
contestants differ in nothing but what they keep and compute again.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.child_process import serve
from stowage.flows.benchmarks.remat.models import RematCase, build
from stowage.flows.benchmarks.remat.peers import available, make_peer
from stowage.stages.device.heap import keep_freed_memory
from stowage.stages.ir.command import Parser


def digest(loss: float, case: RematCase, parameters: list[torch.nn.Parameter]) -> str:
    """Return the digest of the loss and every gradient, bit for bit."""
    found = hashlib.sha256(loss.hex().encode())
    for p in parameters:
        if p.grad is not None:
            found.update(p.grad.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def begin(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make a planner, a plan's step or a peer, and the function that answers its commands."""
    keep_freed_memory()  # plain PyTorch and the peers get the same setting as plans
    if threads := request["threads"]:
        torch.set_num_threads(threads)
    case = build(request["model"], request["size"], request["depth"])
    stores = Path(request["stores"])
    parameters = list(case.model.parameters())
    if request["runs"] == "planner":
        from stowage.flows.benchmarks.remat.plans import RematPlanner  # imports solvers, which peers do not need

        planner = RematPlanner(case, stores, quick=request["quick"])
        return planner.reply, planner.about() | {"peers": available(case)}
    about: dict[str, Any] = {}
    if request["runs"] == "plan":
        from stowage.flows.api.fit import fit

        contestant: Any = fit(
            case.model,
            case.batch,
            None,
            device_budget=request["budget"],
            loss=case.loss,
            method=request["method"],
            cache_dir=stores,
            quick=request["quick"],
            check="never",  # the plan is timed without checks
        )
    else:
        contestant = make_peer(request["runs"], case, request["setting"])
        about["found_by"] = contestant.how

    def reply(command: Any) -> dict[str, Any]:
        measured = isinstance(command, list)
        for p in parameters:
            p.grad = None
        torch.manual_seed(command[0] if measured else command)
        start = time.perf_counter()
        if measured:
            found = contestant.measure(case.batch)
            loss, answer = found.loss, {"peak_bytes": found.peak_bytes}
        else:
            loss = contestant(case.batch).item()
            answer = {"time_s": time.perf_counter() - start}
        return answer | {"digest": digest(loss, case, parameters)}

    return reply, about


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    serve(begin)
