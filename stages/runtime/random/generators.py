"""The global random generators that a step may draw from: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class GeneratorStates:
    """States of all generators at one moment; not as tensors, which would count in the budget.

    Attributes:
        states: state of each generator, by what people call the generator.
        device: the device of PyTorch's generator besides the CPU's, or None.
    """

    states: dict[str, Any]
    device: torch.device | None

    @staticmethod
    def now(device: torch.device) -> GeneratorStates:
        """Take the present states; `device` is where the step runs."""
        found: dict[str, Any] = {
            "PyTorch's generator": torch.get_rng_state().numpy().tobytes(),
            "Python's generator (`random`)": random.getstate(),
            "NumPy's generator (`numpy.random`)": np.random.get_state(),
        }
        cuda = device if device.type == "cuda" else None
        if cuda is not None:
            found["PyTorch's generator on the GPU"] = torch.cuda.get_rng_state(cuda).numpy().tobytes()
        return GeneratorStates(found, cuda)

    def restore(self) -> None:
        """Set all generators to these states."""
        on_cpu, python, numpy, *on_cuda = self.states.values()
        torch.set_rng_state(_tensor(on_cpu))
        random.setstate(python)
        np.random.set_state(numpy)
        if self.device is not None:
            torch.cuda.set_rng_state(_tensor(on_cuda[0]), self.device)

    def difference(self, other: GeneratorStates) -> str | None:
        """Return the name of a generator whose state differs in `other`."""
        return next((name for name, state in self.states.items() if not same_state(state, other.states[name])), None)


STATE_BYTES = 8192
"""Bytes that PyTorch takes for a moment to tell its generator's state, rounded up."""


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def same_state(one: Any, other: Any) -> bool:
    """Return whether two states of one generator are equal."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)
