"""Executes plans on several ranks, each of which holds one shard of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import torch
from torch import nn

from stowage.stages.device.tiers import Tier
from stowage.stages.ir.errors import RankError
from stowage.stages.runtime.executors.base import ExecutablePlan
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.program import Program
from stowage.stages.runtime.sharding.agreement import agree, together
from stowage.stages.runtime.sharding.contents import ShardedContents
from stowage.stages.runtime.sharding.iteration import ShardedIteration
from stowage.stages.runtime.sharding.sharding import Sharding
from stowage.stages.runtime.sharding.weights import ShardedWeights
from stowage.stages.runtime.sharding.whole_model import whole_model
from stowage.stages.structure.tree import ModuleTree


class ShardedDevice(SingleDevice):
    """The executor of one rank; see `Executor`. Parameters become shards when the first plan is bound."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        open_tier: Callable[[], Tier] | None = None,
        tree: ModuleTree | None = None,
        *,
        sharding: Sharding,
    ) -> None:
        super().__init__(model, optimizer, open_tier, tree)
        self._sharding = sharding
        self._surroundings = partial(ShardedIteration, sharding=sharding)
        self._weights = ShardedWeights(sharding, lambda: self._offloading)

    def bind(
        self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None = None, *, trains: bool = True
    ) -> Program:
        """Make a program of a plan; see `Executor`. Where the first one cannot be bound, parameters are whole again."""
        if self._sharding.sharded:
            self._follow_model()
            return self._bind(plan, outside, trains)
        try:
            return together(self._sharding.ranks, lambda: self._bind(plan, outside, trains))
        except Exception:
            self.undo()
            raise

    def changes(self) -> str:
        """Return which parameters the next plan that is bound gives back or cuts, as text; ranks compare it before."""
        gone, new = self._sharding.changes()
        return "; ".join(f"{kind} {', '.join(names)}" for kind, names in (("without", gone), ("with", new)) if names)

    def _follow_model(self) -> None:
        gone, new = self._sharding.changes()
        if gone or new:
            with self._sharding.inside(), super().lend(None):
                self._sharding.follow_model()

    def undo(self) -> None:
        """Make parameters and states whole again, if all ranks do; they all call this together."""
        if not self._sharding.sharded:
            return
        with suppress(RankError):  # ranks that have lost each other, or do something else, cannot
            agree(self._sharding.ranks, {"work": "to give parameters back whole"})
            with self._sharding.inside(), super().lend(None):
                self._sharding.undo()

    def _bind(self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None, trains: bool) -> Program:
        self._sharding.shard()
        with self._sharding.inside():
            program = super().bind(plan, outside, trains=trains)
        program.around = self._one_step
        program.lender = self._weights
        if trains:
            program.arrange = self._sharding.follow_first
        program.elsewhere = lambda: list(self._sharding.shards().values())
        return program

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Let parameters hold their shards inside; where the block fails, ranks exchange nothing any more.

        Raises:
            PlanMismatchError: the block has not waited for a collective that it has started.
        """
        with self._sharding.ranks.failures.whole(), self._sharding.inside():
            try:
                yield
                self._sharding.under_way.check_over()
            finally:
                self._sharding.under_way.clear()

    @contextmanager
    def lend(self, names: Iterable[str] | None) -> Iterator[None]:
        """Let parameters and states be whole inside, in device memory; all ranks call this together."""
        chosen = None if names is None else list(names)
        if not self._sharding.sharded:  # nothing is cut yet
            with super().lend(chosen):
                yield
            return
        with (
            self._sharding.ranks.failures.whole(),
            self._sharding.inside(),
            super().lend(chosen),
            whole_model(self._sharding, self._optimizer, chosen),
        ):
            yield

    def tracing(self) -> AbstractContextManager[None]:
        """Let modules be called whose parameters are shards: a trace reads no contents."""
        return self._weights.lending()

    def contents(self) -> Contents:
        """Return access to whole parameters and states, which all ranks use together."""
        return ShardedContents(self._model, self._optimizer, self._offloading, self._sharding)

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return the layouts of parameters that are not whole in memory."""
        return self._sharding.layouts()
