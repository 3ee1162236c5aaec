"""Writes a checkpoint of several ranks through `torch.distributed.checkpoint`: each rank writes what it has.

PyTorch's own writer keeps its index as a pickle, so this one writes safetensors files in its stead; `folder` reads
them, and so does PyTorch's `HuggingFaceStorageReader`. New files have new names and the index is replaced at the end,
so a run that is killed while it writes leaves the old checkpoint whole.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.files import make_folder
from stowage.stages.runtime.files.folder import INDEX, OFFSETS, PART, PLACES, SHARDS
from stowage.stages.runtime.files.tensor_file import Entry, write_tensors


@dataclass(frozen=True)
class Piece:
    """One tensor, or the rows of it that this rank has, to be written.

    Attributes:
        entry: name, form and content.
        whole: shape of the whole tensor.
        offsets: where in the whole this begins; None for what is not dealt out, which the index has.
        layout: shape and strides of a tensor that is saved in the order of its memory.
    """

    entry: Entry
    whole: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    layout: tuple[list[int], list[int]] | None = None


class _Planner(DefaultSavePlanner):
    """Plans what this rank writes; PyTorch checks that the ranks' parts make up whole tensors."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        self._pieces[write_item.index.fqn].entry.visit(lambda content: kept.append(content.clone()))
        return kept[0]


def _item(piece: Piece) -> WriteItem:
    shape, dtype = piece.entry.like.shape, piece.entry.like.dtype
    offsets = torch.Size(piece.offsets if piece.offsets is not None else [0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(offsets, shape), TensorProperties(dtype=dtype), torch.Size(piece.whole))
    kind = WriteItemType.SHARD if piece.offsets is not None else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(piece.entry.name, offsets), kind, tensor_data=data)


class _Writer(StorageWriter):
    """Writes one file for each rank, tensor by tensor, and the index at the end."""

    def __init__(self, folder: Path, name: str, pieces: Mapping[str, Piece], metadata: Mapping[str, str]) -> None:
        self._folder, self._name, self._pieces, self._metadata = folder, name, pieces, dict(metadata)
        self._is_first = False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: each writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_first = is_coordinator
        if is_coordinator and self._folder.is_file():
            raise StowageError(
                f"{self._folder} is a file, and the checkpoint of several ranks is a folder: name another one."
            )
        make_folder(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        names = [item.index.fqn for item in plan.items]
        own = [self._pieces[n] for n in names if not self._is_first or self._pieces[n].offsets is not None]
        results = []
        if own:
            offsets = {p.entry.name: p.offsets or [0] * p.entry.like.dim() for p in own}
            places = {name: {OFFSETS: list(begin)} for name, begin in offsets.items()}
            metadata = {"format": "pt", PLACES: json.dumps(places)}
            digest = write_tensors(self._folder / self._name, [p.entry for p in own], metadata)
            results = [WriteResult(MetadataIndex(own[0].entry.name), 0, (self._name, digest))]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = dict(result.storage_data for rank in results for result in rank)
        layouts = {name: piece.layout for name, piece in self._pieces.items() if piece.layout is not None}
        listed = {SHARDS: json.dumps({"files": files, "layouts": layouts})}
        entries = [piece.entry for piece in self._pieces.values() if piece.offsets is None]
        write_tensors(self._folder / INDEX, entries, {**self._metadata, **listed})
        for old in [*self._folder.glob(f"{PART}*"), *self._folder.glob(f".{PART}*")]:  # the latter of killed writers
            if old.name not in files:
                with contextlib.suppress(OSError):
                    old.unlink()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write_pieces(folder: Path, name: str, pieces: Sequence[Piece], metadata: Mapping[str, str], group: Any) -> None:
    """Write a checkpoint; all ranks call this.

    Args:
        folder: where it is written, on a file system that all ranks see.
        name: this rank's file, of a name that no other checkpoint in the folder has.
        pieces: what this rank writes; rank 0 has what is not dealt out.
        metadata: texts of the index, from rank 0.
        group: the process group.

    Raises:
        StowageError: a rank cannot write its part; the old checkpoint is as before.
    """
    by_name = {piece.entry.name: piece for piece in pieces}
    try:
        save(
            {},
            storage_writer=_Writer(folder, name, by_name, metadata),
            planner=_Planner(by_name),
            process_group=group,
        )
    except CheckpointException as error:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
        rank, (first, _) = min(error.failures.items())
        text = str(first) if isinstance(first, StowageError) else f"{type(first).__name__}: {first}"
        raise StowageError(f"Rank {rank} could not write its part of {folder}: {text}") from first
