"""Stores what calls return on disk: one table for each device, beside the measured costs; rows are only ever added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stowage.stages.ir.costs import Returned
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.files import locked
from stowage.stages.ir.source import file_name
from stowage.stages.ir.table import FORMAT_VERSION, UnreadableError, read_rows, write_rows
from stowage.stages.kernels.forms import parse_all, texts
from stowage.stages.kernels.known import Outputs


class ReturnedStore:
    """Outputs by signature, for each device fingerprint, in `folder`; safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, device: str) -> Path:
        return self._folder / f"{file_name(device, 'a device')}.returned.{FORMAT_VERSION}.parquet"

    def read(self, device: str) -> dict[str, Outputs]:
        """Return the outputs of all calls that were run on a device.

        A damaged table counts as empty: its calls are run again.

        Raises:
            UnreadableError: there is a table that this process may not read.
        """
        path = self._path(device)
        try:
            return {r.signature: parse_all(r.outputs) for r in read_rows(path, Returned)} if path.is_file() else {}
        except UnreadableError:
            raise
        except (TableError, ValueError):
            return {}

    def add(self, device: str, found: Mapping[str, Outputs]) -> None:
        """Add the outputs of calls to the table of a device."""
        with locked(self._folder / f"{file_name(device, 'a device')}.returned.lock"):
            merged = {**self.read(device), **found}
            rows = [Returned(signature, texts(outputs)) for signature, outputs in sorted(merged.items())]
            write_rows(self._path(device), Returned, rows)
