"""Brings the list of inputs up to date, and says what has changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stowage.stages.inputs.listing import LIST, StaleInputsError, listed_inputs, write_inputs
from stowage.stages.inputs.named import READERS, TRACE, TRAIN, named_inputs
from stowage.stages.settings import Settings

_SHOWN = 6


def refresh(root: Path, settings: Settings) -> list[str]:
    """List what `settings` name, and drop files that no longer exist: all that is known before the model is built.

    DVC refuses to run a stage one of whose dependencies is missing, and takes a changed list for a changed input.

    Returns:
        A sentence for each stage whose dependencies were incomplete, and one for the files that were dropped.
    """
    named, listed = named_inputs(root, settings), listed_inputs(root)
    gone = sorted({path for paths in listed.values() for path in paths if not (root / path).exists()})
    unknown = write_inputs(root, {reader: named[reader] | set(listed[reader]) - set(gone) for reader in READERS})
    sentences = [f"dvc.yaml now names {_some(paths)} among the deps of {reader}." for reader, paths in unknown.items()]
    if gone:
        sentences.append(f"{LIST} and dvc.yaml no longer name {_some(gone)}, which is gone.")
    return sentences


def mend(root: Path, settings: Settings, reader: str, files: Iterable[str]) -> str | None:
    """List for `reader` what parameters name and `files`, which the stage was seen to read.

    Training reads whatever tracing does, and modules of its own besides.

    Returns:
        A sentence that names what DVC did not know of; None if it knew all.
    """
    named, listed = named_inputs(root, settings), listed_inputs(root)
    seen = named[reader] | set(files)
    if reader == TRACE:
        own = {path for path in listed[TRAIN] if path not in listed[TRACE] and (root / path).exists()}
        wanted = {TRACE: seen, TRAIN: seen | named[TRAIN] | own}
    else:
        wanted = {TRACE: set(listed[TRACE]), TRAIN: seen | set(listed[TRACE])}
    unknown = write_inputs(root, wanted).get(reader)
    if not unknown:
        return None
    return f"{reader} also reads {_some(unknown)}, which dvc.yaml did not name among its deps and now does"


def require_listed(root: Path, settings: Settings, reader: str, files: Iterable[str]) -> None:
    """Mend the list, and refuse to keep a result if DVC did not know what it is made of.

    Raises:
        StaleInputsError: DVC did not know it; now it does.
    """
    if sentence := mend(root, settings, reader, files):
        raise StaleInputsError(f"{sentence}: run the same command again.")


def _some(paths: list[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
