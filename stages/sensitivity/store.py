"""Keeps measured errors by everything that they depend on, so that what was measured once is not measured again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from stowage.stages.ir.code import code_hash, versions_of
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.sensitivity.interpreter import StepTensors

MEASURING = ("stowage.stages.ir", "stowage.stages.rewrite", "stowage.stages.sensitivity")
"""Packages whose code decides what is measured."""

PART_BYTES = 1 << 26
"""Bytes of a tensor that are read at a time."""


class ErrorStore:
    """A folder of measured errors, one table for each step, contents of its tensors, and kinds of codes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, trace: TraceTables, kinds: Iterable[str], live: Sequence[StepTensors]) -> str:
        """Return the key of a measurement, which is the same for equal steps, weights and batches alone."""
        digest = hashlib.sha256(repr((code_hash(*MEASURING), versions_of("torch"), tuple(kinds))).encode())
        digest.update(repr((trace.values, trace.calls, trace.constants, trace.gradients)).encode())
        seen = set[int]()  # of all batches the parameters are the same objects
        for each in live:
            digest.update(f"batch on {each.device}".encode())
            for name, tensor in _named(each):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    for part in _parts(tensor):
                        digest.update(part)
        return digest.hexdigest()[:24]

    def find(self, key: str) -> list[GradientError] | None:
        """Return what was measured; None where nothing was, or where its file is damaged and will be replaced."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return read_rows(path, GradientError)
        except TableError:
            return None

    def add(self, key: str, errors: Sequence[GradientError]) -> None:
        """Keep what was measured, atomically."""
        write_rows(self._path(key), GradientError, errors)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.parquet"


def _named(live: StepTensors) -> Iterator[tuple[str, torch.Tensor]]:
    owners: list[tuple[str, Mapping[str, torch.Tensor]]] = [
        ("parameter", live.parameters),
        ("buffer", live.buffers),
        ("input", {str(number): tensor for number, tensor in enumerate(live.inputs)}),
        ("outside", live.outside),
    ]
    for owner, tensors in owners:
        for name, tensor in tensors.items():
            yield f"{owner} {name}", tensor


def _parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements, in their order, part by part."""
    flat = tensor.detach().reshape(-1)
    length = max(1, PART_BYTES // tensor.element_size())
    for begin in range(0, flat.numel(), length):
        part = flat[begin : begin + length].resolve_conj().resolve_neg().cpu().contiguous()
        yield part.view(torch.uint8).numpy().data
