"""The store of costs: one table a device, only ever added to; beside it, what calls return there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from filelock import FileLock

from stowage.stages.ir.costs import Cost, Returned
from stowage.stages.ir.table import read_rows, write_rows


class CostStore:
    """Costs by signature, for each device fingerprint, in `folder`. Safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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

    def _returned_path(self, device: str) -> Path:
        return self._folder / f"{device}.returned.parquet"

    def returned(self, device: str) -> dict[str, tuple[str, ...]]:
        """Outputs of the calls that were looked at on a device.

        Raises:
            TableError: the file is damaged.
        """
        path = self._returned_path(device)
        return {r.signature: r.outputs for r in read_rows(path, Returned)} if path.exists() else {}

    def add_returned(self, device: str, found: Mapping[str, tuple[str, ...]]) -> None:
        """Add what calls return."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / f"{device}.lock"):
            merged = self.returned(device) | dict(found)
            write_rows(self._returned_path(device), Returned, [Returned(*item) for item in sorted(merged.items())])
