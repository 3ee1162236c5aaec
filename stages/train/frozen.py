"""Freezes parts of a model in the steps of a training: tells programs what trains, and measures how far it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from stowage.stages.freezing.policies import Policy
from stowage.stages.freezing.schedule import Schedule, alone
from stowage.stages.ir.freezable import Distance, Freezable
from stowage.stages.runtime import Program
from stowage.stages.runtime.moves import Moves
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.runtime.sharding.sharding import cut, shard_forms


class FrozenTraining:
    """Runs steps with what the policy lets train.

    Attributes:
        schedule: chooses what trains.
    """

    def __init__(
        self,
        freezable: Freezable,
        policy: Policy,
        seed: int,
        distance: Distance | None,
        ranks: Ranks | None = None,
    ) -> None:
        """Begin a training; without a `distance` nobody asks how far units move.

        Of several `ranks` the first chooses for all, from how far the shards of all of them moved.
        """
        self._ranks = ranks
        self.schedule = Schedule(freezable, policy, seed, self._for_all if ranks is not None else alone)
        self._moves = Moves(freezable.units, distance == "relative") if distance is not None else None
        self._offloading: Offloading | None = None

    def frozen_parameters(self) -> frozenset[str]:
        """Return the parameters that are frozen in the step under way."""
        active = self.schedule.active()
        units = self.schedule.freezable.units
        return frozenset(name for unit in units if unit.name not in active for name in unit.parameters)

    def begin(self, program: Program) -> None:
        """Tell a program what trains when it runs next."""
        program.active.choose(self.schedule.active())
        program.moves = self._moves
        self._offloading = program.offloading if self._moves is not None else None

    def ended(self) -> None:
        """Take in that a step has updated; updates by the CPU that are still under way are waited for."""
        if self._offloading is not None:
            self._offloading.await_updates()
        self.schedule.ended(self._distances())

    def _distances(self) -> dict[str, float]:
        if self._moves is None:
            return {}
        ranks = self._ranks
        if ranks is None:
            found = self._moves.take()
        else:
            found = self._moves.take(lambda sums: ranks.sums(sums, "how far units moved"))
        # What trained and was not updated, as the optimizer lacks it, has not moved: else it would always train.
        return {**dict.fromkeys(self.schedule.active(), 0.0), **found}

    def _for_all(self, choose: Callable[[], frozenset[str]]) -> frozenset[str]:
        assert self._ranks is not None
        return self._ranks.from_first(choose, "what rank 0 lets train")

    @contextmanager
    def in_plain(self, model: nn.Module) -> Iterator[None]:
        """Freeze for a step of plain PyTorch: what is frozen requires no gradient inside."""
        frozen = self.frozen_parameters()
        changed = [p for name, p in model.named_parameters() if name in frozen and p.requires_grad]
        for parameter in changed:
            parameter.requires_grad_(False)
        trains = any(p.requires_grad for p in model.parameters())
        try:
            with torch.set_grad_enabled(trains):  # DistributedDataParallel waits for a backward wherever one can follow
                yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(True)

    def measured(self, model: nn.Module) -> AbstractContextManager[None]:
        """Measure how far an update of plain PyTorch moves what trains."""
        if self._moves is None:
            return nullcontext()
        updated = {name: p for name, p in model.named_parameters() if p.grad is not None}
        return self._moves.of(updated) if self._ranks is None else self._moves_of_shards(updated)

    @contextmanager
    def _moves_of_shards(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Measure the moves of what would be this rank's shards of whole parameters."""
        assert self._ranks is not None
        assert self._moves is not None
        rank, forms = self._ranks.rank, shard_forms(parameters, self._ranks.count)
        before = {n: cut(forms[n], p.detach(), rank) for n, p in parameters.items() if n in forms}
        yield
        for name in filter(self._moves.watches, list(before)):
            self._moves.measured(name, before.pop(name), cut(forms[name], parameters[name].detach(), rank))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint holds.

        Raises:
            PlanMismatchError: it is of another policy, or of other units.
        """
        self.schedule.load_state_dict(state)
