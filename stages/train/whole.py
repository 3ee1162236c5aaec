"""Reads whole parameters from the shards of all ranks, one at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stowage.stages.runtime.files.tensor_file import Entry, Visitor
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.sharding.sharding import Sharding


class WholeContents(Contents):
    """The parameters of a sharded model; all ranks read the same ones in the same order."""

    def __init__(self, contents: Contents, sharding: Sharding) -> None:
        super().__init__(contents.model, contents.optimizer)
        self._contents = contents
        self._sharding = sharding

    def lend(self, tensor: torch.Tensor, use: Visitor) -> None:
        """Call `use` with the whole content of a parameter, or with that of a buffer."""
        name = self._names.get(id(tensor), "")
        if name not in self._sharding.forms:
            self._contents.lend(tensor, use)
            return
        with self._sharding.inside():
            self._contents.lend(tensor, lambda shard: use(self._sharding.whole(name, shard)))


def take_part(entries: Iterable[Entry]) -> None:
    """Take part in what rank 0 writes by `write_tensors`: the same tensors in the same order, to no file."""
    for entry in sorted(entries, key=lambda e: -e.like.element_size()):
        entry.visit(lambda whole: None)
