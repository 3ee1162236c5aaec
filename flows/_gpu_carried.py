"""What is carried between the two machines: one file each way."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.table import write_atomically

MEASURED = "measured.tar.gz"
"""From the machine with the GPU: job, device, trace, costs."""

PLANNED = "planned.tar.gz"
"""To it: job and plans."""


def pack(path: Path, folder: Path) -> int:
    """Everything in `folder` as one file; its bytes. Equal contents give equal files but for gzip's time stamp."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.add(file, str(file.relative_to(folder)))
    write_atomically(path, buffer.getvalue())
    return len(buffer.getvalue())


def unpack(path: Path, folder: Path) -> None:
    """The reverse.

    Raises:
        TableError: the file is missing or damaged.
    """
    if not path.is_file():
        raise TableError(f"{path} is missing: run the step before, and carry its file here.")
    try:
        with tarfile.open(path, mode="r:gz") as archive:
            if not hasattr(tarfile, "data_filter"):  # Python 3.11.0 to 3.11.3
                raise TableError("Unpacking needs Python 3.11.4 or later: install a newer one.")
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise TableError(f"{path} is damaged ({error}): carry it again.") from error
