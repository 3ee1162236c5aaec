"""Writes files that are whole or absent, and explains in a sentence why one cannot be written.

Content is written to a temporary file beside the target, locked by its writer: an unlocked one is left from a writer
that was killed, and the next writer to the same target removes it. The temporary name is random, so that no link that
others put into a shared folder is followed; modes are what the process's umask makes of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from filelock import FileLock, Timeout

from stowage.stages.ir.errors import StowageError, size_text

try:
    import fcntl
except ImportError:  # on Windows other writers cannot be detected, so nothing is removed
    fcntl = None  # type: ignore[assignment]

_RANDOM_BYTES = 8


class UnwritableError(StowageError):
    """A file or folder cannot be written: full, read-only, or not there."""


def unwritable(path: Path, error: OSError, needed_bytes: int = 0) -> UnwritableError:
    """Describe why `path` cannot be written, with its folder and the bytes needed and free there."""
    folder = _existing(path)
    wanted = f", where {size_text(needed_bytes)} are needed and " if needed_bytes else ", where "
    return UnwritableError(
        f"{path} cannot be written ({error.strerror or error}) in the folder {folder.resolve()}{wanted}"
        f"{_free_text(folder)}: make room there, make the folder writable, or name another one."
    )


def _existing(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next((f for f in (folder, *folder.absolute().parents) if os.path.isdir(f)), Path("/"))


def _free_text(folder: Path) -> str:
    try:
        return f"{size_text(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return "it is not known how much is free"


@contextlib.contextmanager
def writing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an `OSError` inside into one sentence about `path`.

    Raises:
        UnwritableError: an `OSError` was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, needed_bytes) from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        UnwritableError: they cannot be made.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Hold a lock file.

    Args:
        path: the lock file.
        timeout_s: how long to wait for it, in seconds; by default for ever.

    Raises:
        UnwritableError: the lock file cannot be made.
        Timeout: another process kept the lock for that long (of `filelock`).
    """
    make_folder(path.parent)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:  # an `OSError` too
        raise
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file, then rename it: a killed process leaves the old file or none, never half of one.

    Raises:
        UnwritableError: the file cannot be written; the old one is as before.
    """
    with atomic_file(path, len(content)) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path, needed_bytes: int = 0) -> Iterator[BinaryIO]:
    """Open a file to write that gets its name at the end of the block; `write_atomically` for content in pieces.

    Args:
        path: the file; folders above it are made.
        needed_bytes: its size, where that is known.

    Raises:
        UnwritableError: the file cannot be written; the old one is as before.
    """
    make_folder(path.parent)
    _remove_left(path)
    with writing(path, needed_bytes), contextlib.ExitStack() as undo:
        while True:
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}")
            undo.callback(temporary.unlink, missing_ok=True)  # before it exists: Ctrl-C may come at any moment
            file = undo.enter_context(_new_file(temporary))
            if _is_held(file, temporary):
                break
        yield file
        file.flush()
        os.replace(temporary, path)


def _new_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w+b")


def _is_held(file: BinaryIO, path: Path) -> bool:
    """Say whether a new file is this process's; another writer may have removed it before it was locked."""
    held = _hold(file)
    with contextlib.suppress(FileNotFoundError):
        return held is not False and os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False


def _hold(file: IO[bytes]) -> bool | None:
    """Lock a file; false where another process has the lock, None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_left(path: Path) -> None:
    """Remove temporary files that killed writers to `path` left beside it."""
    length = len(f".{path.name}.") + 2 * _RANDOM_BYTES
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            name = entry.name
            if len(name) != length or not name.startswith(f".{path.name}.") or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if _hold(file):
                    os.unlink(entry.path)
