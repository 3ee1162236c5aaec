"""Says in a generated step which units train in this run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import EllipsisType

from stowage.stages.ir.errors import ParameterError


class ActiveUnits:
    """The units of a step that freezes, and which of them train: at first all."""

    def __init__(self, units: Sequence[str] = ()) -> None:
        self._units = list(units)
        self._active = frozenset(units)
        self._known: dict[tuple[str | EllipsisType, ...], bool] = {}

    def choose(self, names: Collection[str]) -> None:
        """Let these units train from the next run on, and the others be frozen.

        Raises:
            ParameterError: there is no unit of that name.
        """
        unknown = [name for name in names if name not in self._units]
        if unknown:
            raise ParameterError(f"There is no unit {unknown[0]!r} to train: the units are {', '.join(self._units)}.")
        self._active = frozenset(names)
        self._known.clear()

    def __call__(self, *names: str | EllipsisType) -> bool:
        """Return whether one of some units trains; `...` stands for all between two names."""
        if names not in self._known:
            self._known[names] = not self._active.isdisjoint(self._meant(names))
        return self._known[names]

    def _meant(self, names: tuple[str | EllipsisType, ...]) -> set[str]:
        found = {name for name in names if isinstance(name, str)}
        for before, between, after in zip(names, names[1:], names[2:], strict=False):
            if between is ... and isinstance(before, str) and isinstance(after, str):
                found.update(self._units[self._units.index(before) : self._units.index(after)])
        return found
