"""The global random generators that a step may draw from: PyTorch's, Python's and NumPy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class GeneratorStates:
    """Where all of them are; not as tensors, which would count in the budget.

    Attributes:
        states: by what people call the generator.
        device: of PyTorch's generator besides the CPU's, or None.
    """

    states: dict[str, Any]
    device: torch.device | None

    @staticmethod
    def now(device: torch.device) -> GeneratorStates:
        """As they are; `device` is where the step runs."""
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
        """Put all of them here."""
        on_cpu, python, numpy, *on_cuda = self.states.values()
        torch.set_rng_state(_tensor(on_cpu))
        random.setstate(python)
        np.random.set_state(numpy)
        if self.device is not None:
            torch.cuda.set_rng_state(_tensor(on_cuda[0]), self.device)

    def difference(self, other: GeneratorStates) -> str | None:
        """The name of a generator that is elsewhere in `other`."""
        return next((name for name, state in self.states.items() if not same_state(state, other.states[name])), None)


STATE_BYTES = 8192
"""More than PyTorch takes for a moment to tell where its generator is."""


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)
