"""Files of tensors in the safetensors format, written and read one tensor at a time.

The safetensors library writes what is in memory all at once and maps whole files to read them; here sizes are known
before contents are. The format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header,
little endian; the header, JSON: name -> dtype, shape, first and last byte; then the bytes of the tensors, row-major,
one behind the other. The metadata of a file written here has a hash of the whole file, taken with zeros in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.stages.ir.errors import StowageError, TableError
from stowage.stages.ir.files import atomic_file

Visitor = Callable[[torch.Tensor], None]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_PIECE = 8 << 20
"""Bytes that are made contiguous at once."""

_UNSYNCED = 32 << 20
"""Bytes after which written pages are given back to the system."""


_DIGEST = "stowage.digest"
_NO_DIGEST = "0" * 32


@dataclass(frozen=True)
class Entry:
    """One tensor of a file that is to be written.

    Attributes:
        name: its name in the file.
        like: a tensor of its dtype and shape.
        visit: calls a function with the content; the memory may be released afterwards.
    """

    name: str
    like: torch.Tensor
    visit: Callable[[Visitor], None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the content."""
        return self.like.numel() * self.like.element_size()


def write_tensors(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> str:
    """Write a file atomically, with at most one tensor loaded into memory at a time; return the file's hash.

    Raises:
        StowageError: a tensor has a dtype that the format does not know.
        UnwritableError: the file cannot be written.
    """
    ordered = sorted(entries, key=lambda e: -e.like.element_size())  # so that each starts at a multiple of its size
    header: dict[str, Any] = {"__metadata__": {_DIGEST: _NO_DIGEST, **(metadata or {})}}
    end = 0
    for entry in ordered:
        if entry.like.dtype not in _NAMES:
            raise StowageError(f"'{entry.name}' has dtype {entry.like.dtype}, which safetensors files cannot hold.")
        begin, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": _NAMES[entry.like.dtype],
            "shape": list(entry.like.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    with atomic_file(path, len(start) + end) as file:
        file.write(start)
        digest = _digest()
        digest.update(start)
        sink = Sink(file, digest.update)
        for entry in ordered:
            before = file.tell()
            entry.visit(sink.write)
            if file.tell() - before != entry.nbytes:
                raise StowageError(f"'{entry.name}' is not what it was when {path} was begun: nothing was written.")
        file.seek(start.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())
        sink.sync()
    return str(digest.hexdigest())


def _digest() -> Any:
    return hashlib.blake2b(digest_size=len(_NO_DIGEST) // 2)


class Sink:
    """Writes tensors piece by piece, and removes pages that are on the disk from the page cache."""

    def __init__(self, file: Any, note: Callable[[memoryview], None] = lambda content: None) -> None:
        """Take a file to write to; `note` is called with everything that is written."""
        self._file = file
        self._note = note
        self._waiting_bytes = 0

    def write(self, tensor: torch.Tensor) -> None:
        """Append a tensor."""
        for piece in _pieces(tensor.detach()):
            flat = piece.cpu().resolve_conj().resolve_neg().contiguous()
            nbytes = flat.numel() * flat.element_size()
            if nbytes:
                content = memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr()))
                self._file.write(content)
                self._note(content)
            self._waiting_bytes += nbytes
            if self._waiting_bytes >= _UNSYNCED:
                self.sync()

    def sync(self) -> None:
        """Wait until everything written so far is on the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())
        _forget(self._file.fileno())
        self._waiting_bytes = 0


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts along the first dimension, in order, so that a copy is needed of one part at a time only."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        yield tensor
        return
    row = max(1, tensor.numel() // len(tensor) * tensor.element_size())
    count = max(1, -(-_PIECE // row))
    for start in range(0, len(tensor), count):
        yield tensor[start : start + count]


def _forget(handle: int) -> None:
    """Empty the page cache of a file: its pages would be memory outside the budget."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


class TensorFile:
    """A file to read tensors from.

    Attributes:
        metadata: the metadata of its header.
        forms: name -> a tensor on the meta device, of the dtype and shape of the one in the file.
        digest: the hash that the file states of itself; "" where another program has written it.
    """

    def __init__(self, path: Path, *, hint: str) -> None:
        """Read the header; `hint` says in errors what to do about a damaged file.

        Raises:
            TableError: the file is damaged.
        """
        self._path = path
        self._hint = hint
        self._start = 0
        self._starts: dict[str, int] = {}
        self.forms: dict[str, torch.Tensor] = {}
        self.metadata: dict[str, str] = {}
        try:
            with open(path, "rb") as file:
                start = file.read(9)
                if start[8:] not in (b"", b"{"):
                    raise TableError(f"{path} is no safetensors file: give another file.")
                file.seek(0)
                self._read_header(file)
        except FileNotFoundError as error:
            raise TableError(f"There is no file {path}: give another one.") from error
        except OSError as error:
            raise TableError(f"{path} cannot be read ({error.strerror}): make it a readable file.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise TableError(f"{path} is damaged: {hint}.") from error
        self.digest = self.metadata.pop(_DIGEST, "")

    def _read_header(self, file: Any) -> None:
        length = int.from_bytes(file.read(8), "little")
        end, size = 8 + length, os.fstat(file.fileno()).st_size
        self._start = end
        if end > size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
        self.metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in [*self.metadata, *self.metadata.values()]):
            raise ValueError("metadata are texts")
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            form = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
            begin, after = entry["data_offsets"]
            if 8 + length + begin != end or after - begin != form.nbytes:
                raise ValueError(f"the offsets of {name} are wrong")
            self._starts[name], self.forms[name], end = end, form, end + form.nbytes
        if end != size:
            raise ValueError("the file does not end with its last tensor")

    def verify(self) -> None:
        """Read the whole file once and compare its hash; a file that another program has written has none.

        Raises:
            TableError: the file is not what was written.
        """
        if not self.digest:
            return
        digest, place = _digest(), self.digest.encode()
        try:
            with open(self._path, "rb", buffering=0) as file:
                piece = file.read(self._start).replace(place, _NO_DIGEST.encode(), 1)
                while piece:
                    digest.update(piece)
                    piece = file.read(_PIECE)
                    _forget(file.fileno())
        except OSError as error:
            raise TableError(f"{self._path} cannot be read ({error.strerror}): {self._hint}.") from error
        if digest.hexdigest() != self.digest:
            raise TableError(f"{self._path} is damaged, or was changed after it was written: {self._hint}.")

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own."""
        form = self.forms[name]
        made = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        self.read(name, made)
        return made

    def read(self, name: str, target: torch.Tensor, first_row: int = 0) -> None:
        """Copy one tensor, or some of its rows; see `TensorSource`.

        Raises:
            TableError: the file ended early.
        """
        form = self.forms[name]
        skipped = first_row * (form.numel() // form.shape[0]) * form.element_size() if first_row else 0
        with open(self._path, "rb", buffering=0) as file, torch.no_grad():
            file.seek(self._starts[name] + skipped)
            for piece in _pieces(target):
                straight = piece.device.type == "cpu" and piece.is_contiguous()
                flat = piece if straight else torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
                if flat.numel():
                    self._fill(file, memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B"))
                if not straight:
                    piece.copy_(flat)
                _forget(file.fileno())

    def _fill(self, file: Any, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            more = file.readinto(memory[done:])
            if not more:
                raise TableError(f"{self._path} ended early: it was changed while it was read.")
            done += more
