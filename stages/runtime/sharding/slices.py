"""Reads the rows of whole tensors that one rank has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stowage.stages.ir.collectives import ShardForm
from stowage.stages.runtime.files.source import TensorSource
from stowage.stages.runtime.sharding.memory import memory_of
from stowage.stages.runtime.sharding.sharding import Sharding


class Slice:
    """The rows of whole tensors that one rank has; see `TensorSource`.

    Attributes:
        metadata: that of the whole tensors.
        forms: name -> this rank's shard on the meta device, padding included.
    """

    def __init__(self, file: TensorSource, sharding: Sharding, owners: Mapping[str, str]) -> None:
        """Take rows of tensors that are cut as the parameters `owners` are."""
        self._file, self._sharding, self._owners = file, sharding, owners
        self.metadata = file.metadata

    def _form(self, name: str) -> ShardForm:
        return self._sharding.forms[self._owners[name]]

    @property
    def forms(self) -> Mapping[str, torch.Tensor]:
        """Return the shards on the meta device, by name."""
        return {name: self._file.forms[name].new_empty(self._form(name).shape) for name in self._owners}

    def verify(self) -> None:
        """Do nothing: the whole tensors have been verified."""

    def get(self, name: str) -> torch.Tensor:
        """Read one shard into memory of its own."""
        made = torch.empty(self._form(name).shape, dtype=self._file.forms[name].dtype, device="cpu")
        self.read(name, made)
        return made

    def read(self, name: str, target: torch.Tensor, first_row: int = 0) -> None:
        """Copy one shard into `target`, and fill what is padding with zeros."""
        form, rank = self._form(name), self._sharding.ranks.rank
        like = self._sharding.whole_layout(self._owners[name])
        own = form.own_rows(rank)
        if tuple(like.shape[1:]) == form.shape[1:] and like.dim() == len(form.shape):
            if own:
                self._file.read(name, target.narrow(0, 0, own), rank * form.shard_rows)
        else:  # dealt out in the order of memory
            whole = torch.empty_strided(like.shape, like.stride(), dtype=target.dtype, device=target.device)
            self._file.read(name, whole)
            begin = rank * form.shard_elements
            target.narrow(0, 0, own).copy_(memory_of(whole)[begin : begin + own])
        target.narrow(0, own, target.shape[0] - own).zero_()
