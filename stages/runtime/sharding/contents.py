"""Reads and replaces whole parameters and optimizer states of which each rank has a shard; all ranks call together."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.optimizers import bare_step, twin_of
from stowage.stages.runtime.files.folder import PART, TensorFolder, is_there, own_name
from stowage.stages.runtime.files.source import TensorSource
from stowage.stages.runtime.files.tensor_file import Entry, TensorFile, Visitor
from stowage.stages.runtime.files.torch_file import write_torch
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.sharding.agreement import together
from stowage.stages.runtime.sharding.sharding import Sharding
from stowage.stages.runtime.sharding.slices import Slice

Result = TypeVar("Result")


class ShardedContents(Contents):
    """The contents of a sharded model; see `Contents`.

    Tensors are given by what stands for them between steps: a parameter of the model, or a state of the optimizer,
    which is a shard. What is lent is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        offloading: Offloading | None,
        sharding: Sharding,
    ) -> None:
        super().__init__(model, optimizer, offloading)
        self._sharding = sharding
        self._states: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self.writes = sharding.ranks.rank == 0

    def _owner(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter that is cut as the tensor is; None for a tensor that all ranks have."""
        name = self._names.get(id(tensor))
        if name is not None:
            return name if name in self._sharding.forms else None
        found = self._states.get(id(tensor))
        if (found is None or found[0]() is not tensor) and self.optimizer is not None:
            self._states = {
                id(state): (weakref.ref(state), self._names[id(parameter)])
                for parameter, states in self.optimizer.state.items()
                for state in states.values()
                if isinstance(state, torch.Tensor) and id(parameter) in self._names
            }
            found = self._states.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return None
        form = self._sharding.forms.get(found[1])
        return found[1] if form is not None and tuple(tensor.shape) == form.shape else None

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Let the optimizer load a `state_dict`; states that are tensors follow by `new_state`."""
        with self._sharding.raw_states():
            super().load_optimizer_state(state)
        for name, parameter in self.model.named_parameters():
            if name in self._sharding.forms and not parameter.dim():
                self._cut_numbers(name, parameter)

    def _cut_numbers(self, name: str, parameter: nn.Parameter) -> None:
        """Cut the states of a parameter without dimensions: they are numbers, as others are that all ranks have."""
        assert self.optimizer is not None
        form, own = self._sharding.forms[name], self._sharding.forms[name].own_rows(self._sharding.ranks.rank)
        held = self.optimizer.state.get(parameter, {})
        if not held:
            return
        stand_in = nn.Parameter(torch.zeros(form.shape, dtype=parameter.dtype, device=parameter.device))
        twin = twin_of(self.optimizer, {id(parameter): stand_in})
        stand_in.grad = torch.zeros_like(stand_in)
        bare_step(twin)
        for key, like in twin.state[stand_in].items():
            if isinstance(like, torch.Tensor) and tuple(like.shape) == form.shape and not held.get(key, like).dim():
                shard = torch.zeros_like(like)
                shard[:own] = held[key]
                with self._sharding.inside():
                    self.set_state(parameter, key, shard)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict` with shards, or what stands for them; `lend` gives whole states."""
        with self._sharding.raw_states():
            return super().optimizer_state()

    def settle(self) -> None:
        """Wait for all copies and updates."""
        with self._sharding.inside():
            super().settle()

    def forget_states(self) -> None:
        """Forget all optimizer states, before the optimizer loads others."""
        with self._sharding.inside():
            super().forget_states()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return shape, strides and dtype of the whole content, as a tensor on the meta device."""
        name = self._owner(tensor)
        if name is None:
            with self._sharding.inside():
                return super().like(tensor)
        return self._sharding.whole_layout(name).to(tensor.dtype)

    def lend(self, tensor: torch.Tensor, use: Visitor) -> None:
        """Call `use` with the whole content of a parameter, buffer or state; all ranks call this in the same order."""
        name = self._owner(tensor)
        if name is None:
            with self._sharding.inside():
                super().lend(tensor, use)
            return
        whole: list[torch.Tensor] = []
        self._make_room(self.like(tensor).nbytes)
        self._lend_own(tensor, lambda shard: whole.append(self._sharding.whole(name, shard)))
        use(whole[0])

    def _make_room(self, nbytes: int) -> None:
        if self._offloading is not None:
            with self._sharding.inside():
                self._offloading.make_room(nbytes)

    def _lend_own(self, tensor: torch.Tensor, use: Visitor) -> None:
        """Call `use` with this rank's shard."""
        with self._sharding.inside():
            super().lend(tensor, use)

    def entries(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
        """Return an entry of a file for each whole tensor."""
        return [Entry(name, self.like(tensor), self._visit(tensor)) for name, tensor in tensors]

    def _visit(self, tensor: torch.Tensor) -> Callable[[Visitor], None]:
        return lambda use: self.lend(tensor, use)

    def replace(self, tensor: torch.Tensor, file: TensorSource, key: str) -> None:
        """Read this rank's part of a parameter, or a buffer, from a file."""
        name = self._owner(tensor)
        source = file if name is None else Slice(file, self._sharding, {key: name})
        with self._sharding.inside():
            super().replace(tensor, source, key)

    def new_state(self, parameter: torch.Tensor, state: str, file: TensorSource, key: str) -> None:
        """Read this rank's part of a state from a file."""
        name = self._owner(parameter)
        is_cut = name is not None and file.forms[key].shape == self._sharding.whole_layout(name).shape
        source = Slice(file, self._sharding, {key: name}) if name is not None and is_cut else file
        with self._sharding.inside():
            super().new_state(parameter, state, source, key)

    def open(self, path: Path, hint: str) -> TensorSource:
        """Open a file that has whole tensors, or a checkpoint of any number of ranks."""
        ranks = self._sharding.ranks
        if path.is_dir():
            return TensorFolder(path, hint=hint, rank=ranks.rank, ranks=ranks.count)
        return TensorFile(path, hint=hint)

    def sees(self, path: Path) -> bool:
        """Return whether there is something at a path.

        Raises:
            ParameterError: there is for some ranks only.
        """
        found = self._sharding.ranks.all(is_there(path))
        if any(found) and not all(found):
            raise ParameterError(
                f"{path} is there for rank {found.index(True)} and not for rank {found.index(False)}: name a place on "
                "a file system that all ranks see."
            )
        return all(found)

    def together(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns for this rank.

        Raises:
            RankError: it fails for another rank.
        """
        return together(self._sharding.ranks, work)

    def write(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
        """Write whole tensors to one file by rank 0, which all ranks lend theirs."""
        left = sorted(entries, key=lambda entry: -entry.like.element_size())  # the order in which they are written
        waiting = list(left)

        def visit(entry: Entry) -> Callable[[Visitor], None]:
            def lend(use: Visitor) -> None:
                waiting.remove(entry)
                entry.visit(use)

            return lend

        def work() -> None:
            try:
                if self.writes:
                    counted = [Entry(entry.name, entry.like, visit(entry)) for entry in left]
                    super(ShardedContents, self).write(path, counted, metadata)
            finally:  # also where writing fails: the other ranks go on
                for entry in waiting:
                    entry.visit(lambda content: None)

        self.together(work)

    def write_torch(self, path: Path, item: Any) -> None:
        """Write nested containers with whole states as `torch.save` does, by rank 0, which all ranks lend theirs."""
        waiting = [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)]

        def lend(tensor: torch.Tensor, use: Visitor) -> None:
            assert waiting.pop(0) is tensor
            self.lend(tensor, use)

        def work() -> None:
            try:
                if self.writes:
                    write_torch(path, item, self.like, lend)
            finally:  # also where writing fails: the other ranks go on
                for tensor in waiting:
                    self.lend(tensor, lambda content: None)

        self.together(work)

    def write_checkpoint(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        """Write a checkpoint: each rank the rows that it has; see `write_pieces`."""
        from stowage.stages.runtime.sharding.writing import Piece, write_pieces  # takes a second to import

        ranks = self._sharding.ranks
        places = ranks.all(str(path.absolute()))
        if len(set(places)) > 1:
            raise ParameterError(
                f"Ranks save to different places, such as {sorted(set(places))[0]} and {sorted(set(places))[1]}: give "
                "all the same one, on a file system that all see."
            )
        pieces: list[Piece] = []
        for name, tensor in tensors.items():
            owner = self._owner(tensor)
            if owner is not None:
                pieces += self._pieces(name, tensor, owner)
            elif ranks.rank == 0:
                pieces.append(_common(Entry(name, self.like(tensor), self._visit(tensor))))
        for name, tensor in own.items():
            pieces.append(_common(Entry(own_name(name, ranks.rank), tensor, self._visit(tensor))))
        mark = ranks.from_first(lambda: secrets.token_hex(4))
        file = f"{PART}{ranks.rank:05}-of-{ranks.count:05}-{mark}.safetensors"
        with ranks.failures.named(f"the checkpoint at {path}"):
            write_pieces(path, file, pieces, metadata, ranks.group)

    def _pieces(self, name: str, tensor: torch.Tensor, owner: str) -> list[Any]:
        """Return the rows that this rank has without padding; none where all are padding."""
        from stowage.stages.runtime.sharding.writing import Piece

        form, rank = self._sharding.forms[owner], self._sharding.ranks.rank
        own = form.own_rows(rank)
        if not own:
            return []
        whole = self._sharding.whole_layout(owner)
        lies = len(form.shape) != whole.dim() or form.shape[1:] != tuple(whole.shape[1:])
        shape = (form.elements,) if lies else tuple(whole.shape)
        like = torch.empty((own, *form.shape[1:]), dtype=tensor.dtype, device="meta")

        def visit(use: Visitor) -> None:
            self._lend_own(tensor, lambda shard: use(shard.narrow(0, 0, own)))

        layout = (list(whole.shape), list(whole.stride())) if lies else None
        offsets = (rank * form.shard_rows, *[0] * (len(shape) - 1))
        return [Piece(Entry(name, like, visit), shape, offsets, layout)]


def _common(entry: Entry) -> Any:
    from stowage.stages.runtime.sharding.writing import Piece

    return Piece(entry, tuple(entry.like.shape))
