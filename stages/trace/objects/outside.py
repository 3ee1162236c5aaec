"""Looks up tensors that belong neither to the model nor to the batch, where they are at each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from stowage.stages.trace.objects.preserve import PreserveWay


class Outside(Mapping[str, torch.Tensor]):
    """Maps names to tensors that belong neither to the model nor to the batch.

    A tensor that replaces one in the user's objects (`self.bank = updated`) is found in its place; one that no object
    refers to is known by reference alone.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], ways: Mapping[str, PreserveWay]) -> None:
        self._tensors = dict(tensors)
        self._ways = {name: way for name, way in ways.items() if way.steps}

    def __getitem__(self, name: str) -> torch.Tensor:
        known = self._tensors[name]
        way = self._ways.get(name)
        if way is None:
            return known
        try:
            now = way.end()
        except (LookupError, AttributeError, TypeError):
            return known
        return now if isinstance(now, torch.Tensor) else known

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def differs(self) -> str | None:
        """Return the place of a tensor that is missing or has another form than when it was traced; None for none."""
        for name, known in self._tensors.items():
            way = self._ways.get(name)
            if way is None:
                continue
            try:
                now = way.end()
            except (LookupError, AttributeError, TypeError):
                return str(way)
            if now is not known and not _alike(now, known):
                return str(way)
        return None


def _alike(now: object, known: torch.Tensor) -> bool:
    return isinstance(now, torch.Tensor) and (
        (now.shape, now.dtype, now.device, now.stride(), now.requires_grad)
        == (known.shape, known.dtype, known.device, known.stride(), known.requires_grad)
    )
