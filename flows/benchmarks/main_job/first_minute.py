"""Measures how long planning takes before the first step: with nothing stored, and after earlier plans."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.child_process import Served
from stowage.stages.ir.files import write_atomically
from stowage.stages.settings.load import read_parameters

CONTESTANT = "stowage.flows.benchmarks.main_job.contestant"
CASES = (
    ("cold, with nothing stored yet", "50%"),
    ("warm, for another amount of memory", "65%"),
    ("warm, the same again", "50%"),
)
"""Plans that are made in turn from one store that is empty at first: a text for people, and the budget."""


@dataclass(frozen=True)
class FirstMinuteRow:
    """One plan: what it was made from, and the seconds from the model to a step that can run.

    Attributes:
        what: which plan, for people.
        budget: its budget.
        seconds: seconds by the clock.
        processor_s: seconds of processors, child processes included: what others do on the machine does not count.
    """

    what: str
    budget: str
    seconds: float
    processor_s: float


def run_first_minute(root: Path, folder: Path, say: Callable[[str], None]) -> str:
    """Plan the main job of `params.yaml` several times, and write `first_minute.json` into `folder`.

    Each plan is made in a process of its own, in the project `root`. Return a line for each plan.
    """
    params = read_parameters(root / "params.yaml")
    rows = []
    with tempfile.TemporaryDirectory() as store:
        for what, budget in CASES:
            rows.append(
                FirstMinuteRow(what, budget, *_planned_s({"params": params, "store": store, "budget": budget}, root))
            )
            say(f"{what}: {rows[-1].seconds:.1f} s")
    write_atomically(folder / "first_minute.json", (json.dumps([asdict(r) for r in rows], indent=2) + "\n").encode())
    return "\n".join(f"{r.what} (within {r.budget} of plain PyTorch's memory): {r.seconds:.1f} s" for r in rows)


def _planned_s(request: dict[str, Any], root: Path) -> tuple[float, float]:
    contestant = Served("a plan", CONTESTANT, request | {"method": "auto"}, root)
    try:
        return float(contestant.about["plan_s"]), float(contestant.about["processor_s"])
    finally:
        contestant.close()
