"""Replays random numbers: an operation that runs again draws what it drew the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomStates:
    """States of the device's global generator, one for each random node that will run again in this iteration.

    The state is taken anew in every iteration: kept from an earlier one, every later iteration would replay old masks.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._states: dict[int, torch.Tensor] = {}

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._cuda is not None:
            torch.cuda.set_rng_state(state, self._cuda)
        else:
            torch.set_rng_state(state)

    @contextmanager
    def record(self, node: int) -> Iterator[None]:
        """Run a node for the first time: remember the state it starts from."""
        self._states[node] = self._get()
        yield

    @contextmanager
    def replay(self, node: int) -> Iterator[None]:
        """Run a node again from its first state; the global generator is left as if nothing had happened."""
        current = self._get()
        self._set(self._states[node])
        try:
            yield
        finally:
            self._set(current)

    def forget(self, node: int) -> None:
        """Free a state that no later row needs."""
        del self._states[node]

    def clear(self) -> None:
        """Forget everything, after an iteration that was broken off."""
        self._states.clear()
