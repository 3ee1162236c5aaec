"""A model under a plan beside the same in plain PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stowage.flows.api.training_step import TrainingStep
from stowage.stages.workload.calls import call_model


class Beside:
    """Two equal models.

    Attributes:
        ours: the one that is planned.
        eager: the one that plain PyTorch trains.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.ours = make()
        torch.manual_seed(0)
        self.eager = make()
        self._plain = torch.optim.AdamW(self.eager.parameters(), lr=1e-2)
        self._random = torch.get_rng_state()

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        """What both train with."""
        return torch.optim.AdamW(parameters, lr=1e-2)

    def eager_loss(self, batch: Any) -> torch.Tensor:
        """As a user's loop calls the model."""
        loss: torch.Tensor = call_model(self.eager, batch)
        return loss

    def equal(self, step: Callable[[], torch.Tensor], loss: Callable[[], torch.Tensor]) -> None:
        """One step of each from the same random state: loss, parameters and random state afterwards are equal."""
        torch.set_rng_state(self._random)
        self._plain.zero_grad()
        expected = loss()
        expected.backward()  # type: ignore[no-untyped-call]
        self._plain.step()
        after = torch.get_rng_state()
        torch.set_rng_state(self._random)
        found = step()
        assert torch.equal(found, expected.detach())
        assert torch.equal(torch.get_rng_state(), after)
        for (name, mine), theirs in zip(self.ours.named_parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
        self._random = after

    @staticmethod
    def plans(step: TrainingStep) -> int:
        """How many plans the step has made."""
        return len(step.programs.known)
