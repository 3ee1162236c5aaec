"""Remembers what the ranks of a group have measured together: what is measured anew differs, and all plans with it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.table import read_record, write_record

Found = TypeVar("Found")

Member = tuple[str, str]
"""A rank's host, and the fingerprint of its device."""


def place_of(folder: Path, backend: str, members: Sequence[Member], what: str = "") -> Path:
    """Return the file for ranks on such devices, so many of them on each host, whatever the hosts' names are.

    Args:
        folder: the folder of such files.
        backend: what ranks exchange data by.
        members: the ranks.
        what: what was measured, if not their collectives.
    """
    hosts = list(dict.fromkeys(host for host, _ in members))
    text = repr((backend, [(hosts.index(host), device) for host, device in members])) + what
    return folder / f"ranks_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def remembered(path: Path, record: type[Found]) -> Found | None:
    """Return what was measured before; None where nothing was, or the file is not whole or has what no ranks take."""
    try:
        found = read_record(path, record)
    except TableError:
        return None
    return found if all(0 < value < math.inf for value in vars(found).values() if isinstance(value, float)) else None


def remember(path: Path, rates: object) -> None:
    """Write down what was measured.

    Raises:
        UnwritableError: it cannot be written.
    """
    write_record(path, rates)
