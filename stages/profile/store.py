"""Stores costs: one table for each device, which is only ever added to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from stowage.stages.ir.code import code_hash
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.files import locked
from stowage.stages.ir.source import file_name
from stowage.stages.ir.table import FORMAT_VERSION, UnreadableError, read_rows, write_rows
from stowage.stages.kernels import ReturnedStore

_PROFILE, _DEVICE = "stowage.stages.profile", "stowage.stages.device"

MEASURING = (
    f"{_DEVICE}.cpu",
    f"{_DEVICE}.cuda",
    f"{_DEVICE}.events",
    f"{_DEVICE}.peaks",
    f"{_PROFILE}.arguments",
    f"{_PROFILE}.clip",
    f"{_PROFILE}.indices",
    f"{_PROFILE}.line",
    f"{_PROFILE}.measure",
    f"{_PROFILE}.roofline",
    f"{_PROFILE}.samples",
    f"{_PROFILE}.sequence",
    f"{_PROFILE}.timing",
    f"{_PROFILE}.updates",
    f"{_PROFILE}.windows",
    f"{_PROFILE}.written",
    "stowage.stages.kernels.made_up",
    "stowage.stages.kernels.substitutes",
    "stowage.stages.optimizers.bench",
)
"""Code that decides which number is measured or estimated for a call; measured costs are kept under its hash.

It is what runs, in which surroundings and how often, by which clock, and what is made of the samples. Left out is what
only chooses which calls are measured, looks them up, compares what they return, or scales them to other sizes: changes
there leave a stored number as true as it was. Measuring takes minutes on the device itself, which may not be at hand,
so docstrings and comments do not count here, unlike for plans.
"""


def code_of_costs() -> str:
    """Return the hash of the code that measures."""
    return code_hash(*MEASURING, words=False)


class CostStore:
    """Costs by signature, for each device fingerprint and the code that measured them, in `folder`.

    It is safe for several processes at once; a file that has not changed is read once.

    Attributes:
        returned: a store of what calls return, in the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[tuple[int, ...], dict[str, Cost]]] = {}
        self.returned = ReturnedStore(folder)

    def _path(self, device: str) -> Path:
        return self._folder / f"{file_name(device, 'a device')}.{code_of_costs()}.{FORMAT_VERSION}.parquet"

    def read(self, device: str) -> dict[str, Cost]:
        """Return everything known about a device; empty when nothing is.

        A damaged file counts as missing: its costs can be measured again, and it is then replaced.

        Raises:
            UnreadableError: there is a file that this process is not allowed to read.
        """
        path = self._path(device)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        version = found.st_ino, found.st_mtime_ns, found.st_size  # each version of the code has a file of its own
        before, known = self._read.get(device, ((), {}))
        if before != version:
            try:
                known = {c.signature: c for c in read_rows(path, Cost) if c.is_possible()}
            except UnreadableError:
                raise
            except TableError:
                known = {}
            self._read[device] = version, known
        return dict(known)

    def add(self, device: str, costs: Iterable[Cost], *, enough: int = 1, instead: Collection[str] = ()) -> None:
        """Add costs. A measurement that is already there stays, so that plans do not change by noise.

        Args:
            device: the device's fingerprint.
            costs: new costs.
            enough: samples that make a measurement; those of fewer samples are replaced.
            instead: signatures whose measurements are replaced by these.
        """
        with locked(self._folder / f"{file_name(device, 'a device')}.lock"):
            known = self.read(device)
            stays = {s: c for s, c in known.items() if c.is_measured(enough) and s not in instead}
            rows = sorted((known | {c.signature: c for c in costs} | stays).values(), key=lambda c: c.signature)
            write_rows(self._path(device), Cost, rows)


class Keeper:
    """Stores measurements as they come, and replaces them by better ones of the same calls."""

    def __init__(self, store: CostStore, device: str, enough: int) -> None:
        """Choose store and device; `enough` samples make a measurement, see `CostStore.add`."""
        self._store = store
        self._device = device
        self._enough = enough
        self._mine: set[str] = set()

    def keep(self, costs: Sequence[Cost]) -> None:
        """Store costs; those that an earlier call of this method stored are replaced."""
        if costs:
            self._store.add(self._device, costs, enough=self._enough, instead=self._mine)
            self._mine.update(c.signature for c in costs)
