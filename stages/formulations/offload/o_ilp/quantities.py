"""Holds the variables of O-ILP for one portion of a group of parameters, and what follows from them in each step.

The symbols are those of `model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stowage.stages.formulations.offload.problem import ParameterGroup
from stowage.stages.ir.machine import Placement
from stowage.stages.solver.milp import pulp


class Moving:
    """Holds Sto, Ofl and Prf of the weights of a portion, or of its states."""

    def __init__(
        self,
        name: str,
        nbytes: int,
        whole: Any,
        needed: Sequence[int],
        change: int | None,
        steps: int,
        reach: int | None,
    ) -> None:
        self.name, self.nbytes, self.whole, self.change, self.steps = name, nbytes, whole, change, steps
        self.needed = frozenset(needed)
        near = steps if reach is None else reach
        ahead = {t for u in needed for k in range(1, near + 1) if (t := (u - k) % steps) not in self.needed}
        behind = {(u + k) % steps for u in needed for k in range(near)}
        self._reload = {t: _fraction(f"Prf_{name}_{t}") for t in sorted(ahead)}
        self._valid: dict[int, Any] = {}
        if change is not None:
            value: Any = 0
            for k in range(steps):
                t = (change + k) % steps
                if k and (t - 1) % steps in behind:
                    value = _fraction(f"Valid_{name}_{t}")
                self._valid[t] = value
        self._stored: dict[int, Any] = {}
        start = min(self.needed)
        current: Any = whole
        for k in range(steps):
            t, before = (start + k) % steps, (start + k - 1) % steps
            if t in self.needed:
                current = whole
            elif before in self.needed or before in self._reload or self._valid.get(t) is not self._valid.get(before):
                current = _fraction(f"Sto_{name}_{t}")
            self._stored[t] = current

    def stored(self, t: int) -> Any:
        """Return the fraction on the device all through step t."""
        return self._stored[t]

    def reloaded(self, t: int) -> Any:
        """Return the fraction reloaded during step t."""
        return self._reload.get(t, 0)

    def valid(self, t: int) -> Any:
        """Return the fraction with a valid copy in the lower tier before step t: Σ_{t'=g_w}^{t−1} Ofl."""
        return self._valid[t]

    def offloaded(self, t: int) -> Any:
        """Return the fraction offloaded during step t; an offload just before the next change would be of no use."""
        following = (t + 1) % self.steps
        if self.change is None or following == self.change or self._valid[following] is self._valid[t]:
            return 0
        return self._valid[following] - self._valid[t]

    def variables(self) -> Iterator[Any]:
        """Yield every variable once."""
        yield from self._reload.values()
        for values in (self._valid, self._stored):
            found = {id(v): v for v in values.values() if isinstance(v, pulp.LpVariable) and v is not self.whole}
            yield from found.values()


class Cpu:
    """Holds the variables of CPU updates: the gradient is offloaded, the update runs, the weight may be reloaded."""

    def __init__(self, name: str, on_cpu: Any, window: tuple[int, ...], reach: int | None) -> None:
        self.window = window
        self.on_cpu = on_cpu
        self._place = {t: k for k, t in enumerate(window)}
        n = len(window)
        near = n if reach is None else reach
        # `window` is g_w < t < f_w. Gradients are offloaded in g_w … f_w−3, updates run in g_w+1 … f_w−2. With a reach,
        # updates in the middle of a long window are in every fourth step; which one differs from group to group.
        self._sent = {t: _fraction(f"Sent_{name}_{t}") for k, t in enumerate(window[: n - 2]) if k < near}
        self._done: dict[int, Any] = {}
        value: Any = 0
        for k in range(1, n - 1):
            if k <= 2 * near or k >= n - near or window[k] % 4 == 0:
                value = _fraction(f"Done_{name}_{window[k]}")
            self._done[window[k]] = value

    def sent(self, t: int) -> Any:
        """Return the fraction whose gradient is in the lower tier before step t."""
        return self._sent.get(t, self.on_cpu) if t in self._place else 0

    def done(self, t: int) -> Any:
        """Return the fraction updated before step t."""
        return self._done.get(t, self.on_cpu) if self._place.get(t, 0) else 0

    def waiting(self, t: int) -> Any:
        """Return the fraction whose gradient waits on the device, after g_w."""
        return self.on_cpu - self.sent(t) if t in self._sent else 0

    def gradient(self, t: int, last_gradient: int) -> Any:
        """Return the fraction whose gradient is offloaded during step t."""
        if t == last_gradient:
            return self.sent(self.window[0])
        return self.sent(self.window[self._place[t] + 1]) - self.sent(t) if t in self._sent else 0

    def updated(self, t: int) -> Any:
        """Return Opt, the fraction updated during step t."""
        k = self._place.get(t, len(self.window))
        if k >= len(self.window) - 1 or self.done(self.window[k + 1]) is self.done(t):
            return 0
        return self.done(self.window[k + 1]) - self.done(t)

    def variables(self) -> Iterator[Any]:
        """Yield every variable once."""
        yield from self._sent.values()
        yield from {id(v): v for v in self._done.values()}.values()


@dataclass(frozen=True)
class Portion:
    """The part of a group with one placement; without a disk there is one portion, the whole.

    Attributes:
        size: its fraction of the group (times r).
        on_cpu: X_w of the portion, or 0.
    """

    group: ParameterGroup
    number: int
    placement: Placement
    size: Any
    on_cpu: Any
    weights: Moving | None
    states: Moving | None
    cpu: Cpu | None

    @property
    def movings(self) -> Iterator[Moving]:
        """Yield weights and states, as far as there are any."""
        if self.weights is not None:
            yield self.weights
        if self.states is not None:
            yield self.states


def _fraction(name: str) -> Any:
    return pulp.LpVariable(name, lowBound=0)
