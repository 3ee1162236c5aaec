"""The store of costs: one table a device, only ever added to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.kernels import ReturnedStore


class CostStore:
    """Costs by signature, for each device fingerprint, in `folder`. Safe for several processes at once.

    Attributes:
        returned: beside them, what calls return.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.returned = ReturnedStore(folder)

    def _path(self, device: str) -> Path:
        return self._folder / f"{device}.parquet"

    def read(self, device: str) -> dict[str, Cost]:
        """Everything known about a device; empty when nothing is.

        Raises:
            TableError: the file is damaged.
        """
        path = self._path(device)
        return {c.signature: c for c in read_rows(path, Cost)} if path.exists() else {}

    def add(self, device: str, costs: Iterable[Cost]) -> None:
        """Add costs; a signature that is already there keeps its measurement, so that plans do not change by noise."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / f"{device}.lock"):
            known = self.read(device)
            merged = {c.signature: c for c in costs} | {s: c for s, c in known.items() if c.source == "measured"}
            rows = sorted((known | merged).values(), key=lambda c: c.signature)
            write_rows(self._path(device), Cost, rows)
