"""Reads what other benchmarks have measured of others: peaks, and overheads over plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.pages.measurement import read_measurement
from stowage.flows.benchmarks.proven.cases import LABELS, MAIN_JOB
from stowage.stages.ir.errors import MIB

WHO = {"checkpoint": "torch.utils.checkpoint", "memory_budget": "activation_memory_budget"}
"""Column of the measured table -> whose points it has."""

CONTESTANTS = {"gradient checkpointing": WHO["checkpoint"], "activation_memory_budget": WHO["memory_budget"]}
"""What a contestant's name in the main job's table begins with -> whose point it is."""

_NUMBER = r"−?\d+(?:\.\d+)?"
_CELL = re.compile(rf"(?P<low>{_NUMBER})(?:–(?P<high>{_NUMBER}))? MiB, (?P<least>{_NUMBER})(?:–(?P<most>{_NUMBER}))?%")


@dataclass(frozen=True)
class MeasuredPoint:
    """What somebody else's step took.

    Attributes:
        who: whose point it is.
        peak_bytes: its measured peak.
        overhead: its measured time over plain PyTorch's, less 1.
    """

    who: str
    peak_bytes: int
    overhead: float


def measured_points(pages: Path) -> dict[str, list[MeasuredPoint]]:
    """Return the points of each model, by its name for people; of a range, the ends.

    Args:
        pages: the folder of measured pages, with its data.
    """
    found = {str(row["model"]): _points(row) for row in _rows(pages, "remat_peers")}
    of_main_job = [MeasuredPoint(who, row["peak_bytes"], row["time_ratio"] - 1) for who, row in _main_job(pages)]
    return found | ({LABELS[MAIN_JOB]: of_main_job} if of_main_job else {})


def _rows(pages: Path, section: str) -> Sequence[Mapping[str, Any]]:
    path = pages / "data" / f"{section}.json"
    return read_measurement(path).rows if path.exists() else ()


def _main_job(pages: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in _rows(pages, "main_job"):
        for begins, who in CONTESTANTS.items():
            if row["contestant"].startswith(begins):
                yield who, row


def _points(row: Mapping[str, object]) -> list[MeasuredPoint]:
    found: list[MeasuredPoint] = []
    for column, who in WHO.items():
        cell = _CELL.search(str(row.get(column) or ""))
        if cell is None:
            continue
        # Who takes less memory takes more time.
        ends = [(cell["low"], cell["most"] or cell["least"])]
        if cell["high"]:
            ends.append((cell["high"], cell["least"]))
        found += [MeasuredPoint(who, int(_value(peak) * MIB), _value(more) / 100) for peak, more in ends]
    return found


def _value(text: str) -> float:
    return float(text.replace("−", "-"))
