"""Keeps a measurement as a JSON file: its rows, and when, where and by which command they were made."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.files import write_atomically

PACKAGES = ("stowage", "torch", "transformers")


@dataclass(frozen=True)
class Measurement:
    """The result of one run of a benchmark.

    Attributes:
        section: the table that shows it.
        date: day of the run.
        machine: where it ran.
        versions: package -> version.
        command: the command that repeats it; empty where there is none.
        rows: each a mapping from column to value; sizes are bytes, times seconds, shares fractions of 1.
        notes: whatever else a reader must know of this run, a sentence each.
    """

    section: str
    date: str
    machine: str
    versions: Mapping[str, str]
    command: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()


def measured_now(
    section: str, command: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
) -> Measurement:
    """Make a measurement of rows that were found now, on this machine."""
    plain = [{key: None if value != value else value for key, value in row.items()} for row in rows]  # JSON has no NaN
    return Measurement(section, datetime.date.today().isoformat(), this_machine(), versions(), command, plain, notes)


def this_machine() -> str:
    """Describe the processor: its name and how many of its cores this process may use."""
    names: list[str] = []
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def versions() -> dict[str, str]:
    """List the versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_measurement(folder: Path, measurement: Measurement) -> None:
    """Write one measurement into the data of the pages."""
    text = json.dumps(asdict(measurement), indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / "data" / f"{measurement.section}.json", text.encode())


def read_measurement(path: Path) -> Measurement:
    """Read one measurement.

    Raises:
        TableError: the file is not one.
    """
    try:
        return Measurement(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TableError(f"{path} is no measurement ({error}); run the benchmark that writes it again.") from None
