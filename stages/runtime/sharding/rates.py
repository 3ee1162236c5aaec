"""Remembers what collectives take among the ranks of a group: what is measured anew differs, and all plans with it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.table import read_record, write_record

Member = tuple[str, str]
"""A rank's host, and the fingerprint of its device."""


def place_of(folder: Path, backend: str, members: Sequence[Member]) -> Path:
    """Return the file for ranks on such devices, so many of them on each host, whatever the hosts' names are."""
    hosts = list(dict.fromkeys(host for host, _ in members))
    text = repr((backend, [(hosts.index(host), device) for host, device in members]))
    return folder / f"ranks_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def remembered(path: Path) -> CollectiveRates | None:
    """Return what was measured before; None where nothing was, or the file is not whole or has what no ranks take."""
    try:
        found = read_record(path, CollectiveRates)
    except TableError:
        return None
    return found if 0 < found.bytes_per_s < math.inf and 0 < found.start_s < math.inf else None


def remember(path: Path, rates: CollectiveRates) -> None:
    """Write down what was measured.

    Raises:
        UnwritableError: it cannot be written.
    """
    write_record(path, rates)
