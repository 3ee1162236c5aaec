"""Finds what rows need besides what they read and make, as a function of the mask: by the flags of their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from stowage.stages.freezing.copies import copies_by_guard
from stowage.stages.freezing.kernels import trained_guards
from stowage.stages.freezing.outputs import optional_results
from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.flags import FLAGGED, asked_for
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.units import Unit, joined


@dataclass(frozen=True)
class Workspace:
    """What one row needs besides what it reads and makes.

    Attributes:
        guard: the guard of the row.
        flags: the guards of its flags, see `ir.flags`.
        nbytes: the bytes by flag.
        copied: bytes of the copies of weights that it makes where their guards have something of the mask, with these.
    """

    guard: int
    flags: tuple[int, ...]
    nbytes: tuple[int, ...]
    copied: tuple[tuple[int, int], ...] = ()

    def under(self, mask: int) -> int:
        """Return the bytes under a mask under which the row runs."""
        own = self.nbytes[sum(bool(guard & mask) << i for i, guard in enumerate(self.flags))]
        return own + sum(nbytes for guard, nbytes in self.copied if guard & mask)

    def by_guard(self) -> Mapping[int, int]:
        """Return the bytes as a sum over guards that a mask has something of."""
        if self.flags:
            return _by_guard(self)
        return Counter({self.guard: self.nbytes[0]}) + Counter(dict(self.copied))


@lru_cache(maxsize=4096)
def _by_guard(workspace: Workspace) -> Mapping[int, int]:
    """Return bytes by guard.

    Leaving out flags gives back bytes, and leaving out more of them more: with f(A) what is given back where no guard
    in A has something of the mask, f(A) = Σ_{B ⊆ A} c(B), and c(B) counts where any of B does.
    """
    guards = list(dict.fromkeys([*workspace.flags, workspace.guard]))
    row, whole = 1 << guards.index(workspace.guard), (1 << len(guards)) - 1

    def with_these(there: int) -> int:
        """Return the bytes where exactly these guards have something of the mask."""
        if not there & row:
            return 0
        return workspace.nbytes[sum((there >> guards.index(g) & 1) << i for i, g in enumerate(workspace.flags))]

    more = [with_these(whole) - with_these(whole & ~out) for out in range(whole + 1)]
    for i in range(len(guards)):
        for out in range(whole + 1):
            if out >> i & 1:
                more[out] -= more[out & ~(1 << i)]
    found: Counter[int] = Counter()
    for out, nbytes in enumerate(more):
        if nbytes:
            found[joined(*(guard for i, guard in enumerate(guards) if out >> i & 1))] += nbytes
    return found


class Workspaces:
    """Finds the workspaces of rows.

    Attributes:
        trace: the trace of the step.
        units: what may be frozen.
    """

    def __init__(self, trace: TraceTables, units: Sequence[Unit]) -> None:
        self.trace, self.units = trace, units

    @cached_property
    def _trained(self) -> Mapping[int, int]:
        return trained_guards(self.trace, self.units)

    def of(self, node: ComputeNode, later: Mapping[int, int], guard: int) -> Workspace:
        """Return the workspace of a row.

        Args:
            node: what the row computes.
            later: the guard of what reads each storage that it makes.
            guard: the guard of the row.
        """
        if node.copied_bytes:
            copied = copies_by_guard(self.trace, node, self.units)
            return Workspace(guard, (), (node.workspace_bytes - node.copied_bytes,), tuple(copied.items()))
        if not node.flagged_bytes:
            return Workspace(guard, (), (node.workspace_bytes,))
        flags: list[int] = []
        for call in (self.trace.calls[c] for c in node.calls):
            if call.target in BY_TRAINING:
                flags.append(self._trained[call.call])
            elif call.target in FLAGGED:
                optional = {o.output: o.guard for o in optional_results(self.trace, call, later, guard)}
                flags += [optional.get(result, guard) for result in asked_for(call.arguments)]
        return Workspace(guard, tuple(flags), node.flagged_bytes)
