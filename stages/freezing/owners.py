"""Knows which units a storage or a call belongs to: gradients and their norms, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stowage.stages.ir.collectives import SCATTER, scattered
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.units import ALWAYS, Unit, bits_of, joined
from stowage.stages.ir.updates import CLIP, NORM, UPDATE, UPDATE_ALL, left_behind, updated_parameter

_TAKE_WHAT_IS_THERE = frozenset({CLIP, UPDATE_ALL})
"""Calls that run always, on the gradients or norms that there are."""


class Owners:
    """Says to which units storages and nodes belong.

    Attributes:
        kept: the guard of each temporary storage that must exist when the step ends.
    """

    def __init__(self, trace: TraceTables, nodes: Sequence[ComputeNode], units: Sequence[Unit]) -> None:
        self._trace = trace
        self._of = bits_of(units)
        self._roles = [s.role for s in trace.storages]
        storage_of = [v.storage for v in trace.values]
        self._gradient: dict[int, int] = {}
        for g in trace.gradients:
            if g.gradient_value >= 0:
                storage = storage_of[g.gradient_value]
                self._gradient[storage] = joined(self._gradient.get(storage, 0), self._unit(g.parameter))
        for call in trace.calls:
            if call.target == SCATTER:
                self._require_together(call)
                names = scattered(call.arguments)
                self._gradient.update((storage_of[v], self._unit(n)) for n, v in zip(names, call.returns, strict=True))
        for value in trace.values:
            role, _, name = value.source.partition(":")
            if role == "gradient":
                self._gradient[value.storage] = self._unit(name)
        self._norm = {
            storage_of[call.returns[0]]: self._gradient.get(storage_of[call.reads[0]], ALWAYS)
            for call in trace.calls
            if call.target == NORM
        }
        gradients = {g.gradient_value for g in trace.gradients}
        self.kept: dict[int, int] = {}
        for value_id in (*left_behind(trace), *trace.meta.left):
            storage = storage_of[value_id]
            own = self._gradient[storage] if value_id in gradients else ALWAYS
            self.kept[storage] = joined(self.kept.get(storage, 0), own)
        for storage, own in self._gradient.items():
            if self._roles[storage] == "gradient" and not self._taken(storage, nodes):
                self.kept[storage] = own

    def _unit(self, parameter: str) -> int:
        return self._of.get(parameter, ALWAYS)

    def _require_together(self, call: Call) -> None:
        """Refuse an exchange of gradients that wait, of which some may not be there.

        Gradients of one micro-batch are all computed where ranks exchange them together and one of them is needed.

        Raises:
            PlanMismatchError: they belong to several units.
        """
        names = list(scattered(call.arguments))
        other = next((n for n in names if self._unit(n) != self._unit(names[0])), None)
        if other is not None and any(self._roles[self._trace.values[v].storage] == "gradient" for v in call.reads):
            raise PlanMismatchError(
                f"The step exchanges the gradients of '{names[0]}' and '{other}' together, and they wait and are "
                "frozen apart: trace it with the units that it freezes."
            )

    def _taken(self, storage: int, nodes: Sequence[ComputeNode]) -> bool:
        """Return whether an update uses up a gradient that waits."""
        ends = (UPDATE, UPDATE_ALL, SCATTER)
        return any(storage in n.reads and any(self._trace.calls[c].target in ends for c in n.calls) for n in nodes)

    def passing(self, storage: int) -> bool:
        """Return whether a storage is made during the step, or is a gradient that waits."""
        return storage >= 0 and self._roles[storage] in ("temporary", "gradient")

    def waiting(self) -> dict[int, int]:
        """Return the guard of each gradient that waits in `.grad` when the step begins."""
        return {s: own for s, own in self._gradient.items() if self._roles[s] == "gradient"}

    def guard(self, node: ComputeNode) -> int:
        """Return the guard that a node has for what it does besides making storages, when it runs first."""
        calls = [self._trace.calls[c] for c in node.calls]
        found = 0
        for call in calls:
            if call.target == UPDATE:
                found = joined(found, self._unit(updated_parameter(call.arguments)[0]))
            elif call.target in _TAKE_WHAT_IS_THERE:
                return ALWAYS
        if any(call.target in (UPDATE, NORM) for call in calls):
            return found
        for storage in node.mutates:
            found = joined(found, self._gradient.get(storage, ALWAYS))
        return found

    def lacking(self, node: ComputeNode) -> Mapping[int, int]:
        """Return the guard of each gradient or norm that a node reads where it is there; it runs without it too."""
        if not any(self._trace.calls[c].target in _TAKE_WHAT_IS_THERE for c in node.calls):
            return {}
        own = {**self._gradient, **self._norm}
        return {s: own[s] for s in node.reads if s in own}
