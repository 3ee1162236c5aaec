"""Runs one step of `first`, or of `race`, in this process.

`python -m stowage.flows.benchmarks.gpu.step REQUEST ANSWER`: both are files of JSON, what is asked and an `StepAnswer`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.first import card, chain, exact, tests, times
from stowage.flows.benchmarks.gpu.job import CUBLAS_REPEATS, CUBLAS_SETTING
from stowage.flows.benchmarks.gpu.process import obey
from stowage.flows.benchmarks.gpu.ranks import training
from stowage.flows.benchmarks.gpu.steps import StepAnswer
from stowage.stages.ir.command import Parser
from stowage.stages.ir.files import write_atomically

KINDS: dict[str, Callable[[dict[str, Any]], StepAnswer]] = {
    "card": card.look,
    "profile": times.profile,
    "tests": tests.run,
    "strict": exact.strict,
    "lanes": exact.lanes,
    "noise": exact.noise,
    "idle": times.idle,
    "measure": chain.measure,
    "plan": chain.plan,
    "train": chain.train,
    "small": times.small,
    "ranks-rates": training.rates,
    "ranks-train": training.train,
    "ranks-compare": training.compare,
}


def main() -> int:
    """Answer one request; what a step raises ends the process, and the one that started it reports that."""
    obey()
    parser = Parser(__doc__)
    parser.add_argument("request", type=Path)
    parser.add_argument("answer", type=Path)
    given = parser.parse_args()
    asked = json.loads(given.request.read_text())
    if asked.get("repeats"):
        os.environ[CUBLAS_SETTING] = CUBLAS_REPEATS
    answer = KINDS[asked["kind"]](asked)
    write_atomically(given.answer, json.dumps(asdict(answer)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
