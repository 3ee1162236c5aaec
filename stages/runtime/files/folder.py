"""Reads a checkpoint that several ranks have written: each its own rows of each tensor, in a safetensors file.

The files are as `HuggingFaceStorageReader` of `torch.distributed.checkpoint` reads them, too: each says where in the
whole tensors its rows belong. Which files belong together is in one more file, `checkpoint.safetensors`, which is
written last and has what is not dealt out to ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.stages.ir.errors import TableError
from stowage.stages.runtime.files.tensor_file import TensorFile

INDEX = "checkpoint.safetensors"
"""The file that lists the others."""

PART = "rank-"
"""The names of the others begin with this."""

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where the safetensors files of `torch.distributed.checkpoint` say which part of a whole tensor theirs is."""

SHARDS = "shards"
"""The metadata of the index that lists the other files and the layouts of tensors that are saved as they lie."""


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor, in one of the files."""

    file: TensorFile
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def is_there(path: Path) -> bool:
    """Say whether there is something at a path besides what a run was killed over, that wrote its first checkpoint."""
    if not path.is_dir() or (path / INDEX).exists():
        return path.exists()
    return not all(part.name.startswith((PART, ".")) for part in path.iterdir())


def own_name(name: str, rank: int) -> str:
    """Return the name under which a rank saves what each rank has of its own."""
    return f"{name}/{rank}"


class TensorFolder:
    """A folder to read tensors from; see `TensorSource`.

    Attributes:
        metadata: the metadata of the index.
        forms: name -> the whole tensor on the meta device; what ranks have of their own has the name without the rank.
    """

    def __init__(self, path: Path, *, hint: str, rank: int = 0, ranks: int = 1) -> None:
        """Read the headers, as one of so many ranks; `hint` says in errors what to do about a damaged folder.

        Raises:
            TableError: files are missing or damaged.
        """
        self._path, self._hint, self._rank, self._ranks = path, hint, rank, ranks
        if not (path / INDEX).is_file():
            raise TableError(f"{path} is a folder without {INDEX}, so it is no checkpoint of several ranks: {hint}.")
        index = TensorFile(path / INDEX, hint=hint)
        self.metadata = index.metadata
        self._forms: dict[str, torch.Tensor] = dict(index.forms)
        self._parts: dict[str, list[Part]] = {n: [_whole(index, n)] for n in index.forms}
        try:
            found = json.loads(self.metadata.pop(SHARDS))
            self._listed: dict[str, str] = dict(found["files"])
            layouts: dict[str, tuple[list[int], list[int]]] = dict(found["layouts"])
            self._files = [index]
            for name, digest in self._listed.items():
                self._open(name, digest)
            self._lying = {name: (torch.Size(shape), tuple(stride)) for name, (shape, stride) in layouts.items()}
            self._join()
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise TableError(f"{path} is damaged, or was changed after it was written: {hint}.") from error

    @property
    def forms(self) -> Mapping[str, torch.Tensor]:
        """Return the whole tensors on the meta device, by name."""
        return self._forms

    def _open(self, name: str, digest: str) -> None:
        file = TensorFile(self._path / name, hint=self._hint)
        if file.digest != digest:
            raise TableError(f"{self._path / name} does not belong to the other files there: {self._hint}.")
        places = json.loads(file.metadata[PLACES])
        for tensor, form in file.forms.items():
            offsets = tuple(int(n) for n in places[tensor][OFFSETS])
            self._parts.setdefault(tensor, []).append(Part(file, offsets, tuple(form.shape)))
        self._files.append(file)

    def _join(self) -> None:
        for name, parts in list(self._parts.items()):
            form = parts[0].file.forms[name]
            rows = sum(part.shape[0] for part in parts) if form.dim() else 0
            whole = form.new_empty((rows, *form.shape[1:])) if form.dim() else form
            if name in self._lying:
                shape, stride = self._lying[name]
                whole = torch.empty_strided(shape, stride, dtype=form.dtype, device="meta")
            self._forms[name] = whole
        for name in [n for n in self._parts if n.startswith("random")]:
            kind, _, rank = name.partition("/")
            if rank == str(self._rank):
                self._forms[kind], self._parts[kind] = self._forms[name], self._parts[name]
            if rank:
                del self._forms[name]

    def verify(self) -> None:
        """Read this rank's share of the files once and compare their hashes; see `TensorSource`."""
        for position, file in enumerate(self._files):
            if position % self._ranks == self._rank:
                file.verify()

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own."""
        form = self._forms[name]
        made = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        self.read(name, made)
        return made

    def read(self, name: str, target: torch.Tensor, first_row: int = 0) -> None:
        """Copy one tensor, or some of its rows, from the files that have them; see `TensorSource`."""
        if name in self._lying:
            shape, stride = self._lying[name]
            flat = target.new_empty(shape.numel())
            self._assemble(name, flat, 0)
            whole = flat.as_strided(shape, stride)
            target.copy_(whole[first_row : first_row + target.shape[0]] if target.dim() else whole)
        else:
            self._assemble(name, target, first_row)

    def _assemble(self, name: str, target: torch.Tensor, first_row: int) -> None:
        parts = self._parts[name]
        for part, begin, there, count in overlaps(name, parts, target, first_row):
            key = name if name in part.file.forms else own_name(name, self._rank)
            part.file.read(key, target.narrow(0, there, count) if target.dim() else target, begin)


def overlaps(
    name: str, parts: Sequence[Part], target: torch.Tensor, first_row: int
) -> list[tuple[Part, int, int, int]]:
    """Return what to read for some rows of a tensor: part, its first row, the first row of the target, rows."""
    # Imported here, since it takes a second, which those who train on one device need not wait.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    if not target.dim():
        return [(parts[0], 0, 0, 0)]
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in parts]
    saved = TensorStorageMetadata(TensorProperties(dtype=target.dtype), target.shape, chunks)
    wanted = ChunkStorageMetadata(torch.Size((first_row, *[0] * (target.dim() - 1))), target.shape)
    found: list[Any] = create_read_items_for_chunk_list(name, saved, [wanted])
    return [
        (parts[item.storage_index.index], item.storage_offsets[0], item.dest_offsets[0], item.lengths[0])
        for item in found
        if target.numel()
    ]


def _whole(file: TensorFile, name: str) -> Part:
    form = file.forms[name]
    return Part(file, (0,) * form.dim(), tuple(form.shape))
