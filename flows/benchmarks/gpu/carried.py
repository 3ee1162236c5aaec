"""Packs what is carried between the two machines: one file each way."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stowage.flows.benchmarks.gpu.job import GpuJob
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.table import read_record

MEASURED = "measured.tar.gz"
"""Name of the file from the machine with the GPU: job, device, trace, costs."""

PLANNED = "planned.tar.gz"
"""Name of the file to the machine with the GPU: job and plans."""

SOURCE = "source.json"


@dataclass(frozen=True)
class CarriedSource:
    """The record of what plans were made from; `source.json` in the file of plans.

    Attributes:
        digest: digest of `measured.tar.gz`.
    """

    digest: str


def digest_of(measured: Path) -> str:
    """Return the digest of a carried file."""
    return hashlib.sha256(measured.read_bytes()).hexdigest()


def is_planned(folder: Path) -> bool:
    """Return whether the plans in a folder were made from the measurements there.

    Raises:
        TableError: the file of plans is damaged.
    """
    if not (folder / MEASURED).is_file() or not (folder / PLANNED).is_file():
        return False
    with tempfile.TemporaryDirectory() as temporary:
        unpack(folder / PLANNED, Path(temporary))
        source = Path(temporary) / SOURCE
        return source.is_file() and read_record(source, CarriedSource).digest == digest_of(folder / MEASURED)


def carried_job(archive: Path) -> GpuJob:
    """Return the job that a carried file is about.

    Raises:
        TableError: the file is missing or damaged.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpack(archive, Path(temporary))
        return read_record(Path(temporary) / "job.json", GpuJob)


def pack(path: Path, folder: Path) -> int:
    """Pack everything in `folder` into one file, and return its bytes; equal contents differ by a time stamp alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.add(file, str(file.relative_to(folder)))
    write_atomically(path, buffer.getvalue())
    return len(buffer.getvalue())


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive written by `pack`.

    Raises:
        TableError: the file is missing or damaged.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the step before, and carry its file here.")
    try:
        with tarfile.open(path, mode="r:gz") as archive:
            for member in archive:
                content = archive.extractfile(member)
                target = (folder / member.name).resolve()
                if content is None or not target.is_relative_to(folder.resolve()):
                    raise TableError(f"{path} has {member.name}, which is no file of its folder: carry it again.")
                write_atomically(target, content.read())  # tarfile's own filter came with Python 3.11.4
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TableError(f"{path} is damaged ({error}): carry it again.") from error
