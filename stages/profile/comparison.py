"""Compares every distinct call's real outputs with the trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.kernels import FakeKernelError, Outputs
from stowage.stages.profile.measure import returned
from stowage.stages.profile.returned import differ, is_compared
from stowage.stages.profile.store import CostStore


class Comparison:
    """Compares outputs of the calls of some traces.

    Args:
        calls: calls by signature, with the trace of each.
        store: knows what was looked at before.
        target: the device.
    """

    def __init__(
        self, calls: Mapping[str, tuple[TraceTables, Call]], store: CostStore, target: DeviceDescription
    ) -> None:
        self._calls = {s: (trace, call) for s, (trace, call) in calls.items() if is_compared(call)}
        self._store = store
        self._target = target

    def check(self, *, run: bool, later: Collection[str]) -> None:
        """Compare stored outputs, and with `run` those of the other calls, except for calls that are measured `later`.

        Raises:
            FakeKernelError: some calls return something else.
        """
        stored = self._store.returned.read(self._target.fingerprint)
        found = {s: stored[s] for s in self._calls if s in stored}
        self._compare(found)
        if not run:
            return
        waiting = set(self._calls) - set(found) - set(later)
        with torch.random.fork_rng(devices=["cuda"] if self._target.type == "cuda" else []), torch.no_grad():
            ran = {
                s: returned(call, trace, self._target.type) for s, (trace, call) in self._calls.items() if s in waiting
            }
        self.add({s: outputs for s, outputs in ran.items() if outputs is not None})

    def add(self, found: Mapping[str, Outputs]) -> None:
        """Store what calls return, and compare it.

        Raises:
            FakeKernelError: some of them return something else.
        """
        if found:
            self._store.returned.add(self._target.fingerprint, found)
            self._compare(found)

    def _compare(self, found: Mapping[str, Outputs]) -> None:
        wrong = {s: outputs for s, outputs in found.items() if s in self._calls and differ(outputs, *self._at(s))}
        if wrong:
            trace, call = self._calls[min(wrong)]
            raise FakeKernelError(wrong, f"{call.target} in module '{call.module or trace.meta.model}'")

    def _at(self, signature: str) -> tuple[Call, TraceTables]:
        trace, call = self._calls[signature]
        return call, trace
