"""Lanes on which nothing is there before its wait: what collectives and reloads write are no numbers until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from stowage.stages.device.tiers import Transfer
from stowage.stages.device.tiers.null import poison
from stowage.stages.runtime.offload.transfers import Transfers
from stowage.stages.runtime.sharding.ranks import Collective, Ranks


class Late:
    """A collective whose result comes with the wait, or never."""

    def __init__(self, work: Collective, target: torch.Tensor, result: torch.Tensor, *, comes: bool) -> None:
        self._work, self._comes = work, comes
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = (target, result)
        target.fill_(float("nan"))

    def wait(self) -> None:
        self._work.wait()
        if self._kept is not None and self._comes:
            target, result = self._kept
            target.copy_(result)
        self._kept = None


class Delay:
    """Delays all collectives of steps; of the kind `lost`, those of one set of parameters never come.

    It is the first set, or the first that has the parameter `of`.
    """

    def __init__(self, lost: str, of: str = "") -> None:
        self._lost, self._of, self._name, self.count = lost, of, "", 0

    @contextmanager
    def all(self) -> Iterator[Delay]:
        """Delay the collectives of steps inside."""
        with (
            mock.patch.object(Ranks, "gather", self.gather(Ranks.gather)),
            mock.patch.object(Ranks, "reduce", self.reduce(Ranks.reduce)),
        ):
            yield self

    def gather(self, real: Callable[..., Collective]) -> Callable[..., Any]:
        def late(ranks: Ranks, whole: torch.Tensor, shard: torch.Tensor, what: str) -> Late:
            result = torch.empty_like(whole)
            return Late(real(ranks, result, shard, what), whole, result, comes=self._comes("gather", what))

        return late

    def reduce(self, real: Callable[..., Collective]) -> Callable[..., Any]:
        def late(ranks: Ranks, whole: torch.Tensor, what: str) -> Late:
            result = whole.clone()
            return Late(real(ranks, result, what), whole, result, comes=self._comes("scatter", what))

        return late

    def _comes(self, kind: str, what: str) -> bool:
        self.count += 1
        if kind != self._lost or (self._of and f"'{self._of}'" not in what):
            return True
        self._name = self._name or what
        return what != self._name


class LateReload:
    """A reload that begins and ends with the wait, or never."""

    def __init__(self, begin: Callable[[], Transfer], tensor: torch.Tensor, *, comes: bool) -> None:
        self._begin: Callable[[], Transfer] | None = begin if comes else None
        poison(tensor)

    def wait(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin().wait()

    def done(self) -> bool:
        return False


class LateReloads:
    """Delays all reloads from a lower tier; those of one parameter or state never come."""

    def __init__(self, lost: str = "") -> None:
        self._lost, self.count = lost, 0

    @contextmanager
    def all(self) -> Iterator[LateReloads]:
        """Delay the reloads of steps inside."""
        with mock.patch.object(Transfers, "reload", self.reload(Transfers.reload)):
            yield self

    def reload(self, real: Callable[[Transfers, str], None]) -> Callable[[Transfers, str], None]:
        def late(transfers: Transfers, name: str) -> None:
            tier, begin, comes = transfers.tier, transfers.tier.reload, name != self._lost

            def reload(slot: str, tensor: torch.Tensor) -> LateReload:
                self.count += 1
                return LateReload(lambda: begin(slot, tensor), tensor, comes=comes)

            with mock.patch.object(tier, "reload", reload):
                real(transfers, name)

        return late
