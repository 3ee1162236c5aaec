"""Records what a trace was made from: the parameters of its section, and the contents of the user's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.inputs.listing import listed_inputs
from stowage.stages.inputs.named import TRACE, named_inputs
from stowage.stages.ir.command import ARTIFACTS
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.table import read_record, write_record
from stowage.stages.settings import Settings

ORIGIN = ARTIFACTS / "origin.json"
"""File beside the trace and not in it: an edit that leaves the trace as it was makes only `train` stale."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"}
"""Suffixes of files that no trace reads: shapes are in the configuration."""


@dataclass(frozen=True)
class Origin:
    """The origin of a trace.

    Attributes:
        parameters: the section `trace` of params.yaml, as JSON.
        files: the user's files, as dvc.yaml names them.
        hashes: SHA-256 of the content of each file.
        configuration_hash: the configuration hash of the trace.
        locations: for each call of the trace `file:line` in the user's code, or "".
    """

    parameters: str
    files: tuple[str, ...]
    hashes: tuple[str, ...]
    configuration_hash: str
    locations: tuple[str, ...] = ()


def content_hashes(root: Path, files: Iterable[str]) -> dict[str, str]:
    """Return SHA-256 of files, and of those in folders except weights; "" for what does not exist."""
    found: dict[str, str] = {}
    for name in sorted(set(files)):
        path = root / name
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            if path.is_dir() and (file.suffix in _WEIGHTS or "__pycache__" in file.parts):
                continue
            key = name if file == path else f"{name}/{file.relative_to(path).as_posix()}"
            found[key] = _hash(file)
    return found


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def write_origin(
    path: Path,
    root: Path,
    settings: Settings,
    files: Iterable[str],
    configuration_hash: str,
    locations: Iterable[str] = (),
) -> None:
    """Write what a trace was made from.

    Args:
        path: the file to write.
        root: the project.
        settings: the project's parameters.
        files: what the trace has been seen to execute.
        configuration_hash: the configuration hash of the trace.
        locations: where the user's code makes each of its calls.
    """
    hashes = content_hashes(root, {*files, *named_inputs(root, settings)[TRACE], *listed_inputs(root)[TRACE]})
    content = tuple(hashes), tuple(hashes.values())
    write_record(path, Origin(_parameters(settings), *content, configuration_hash, tuple(locations)))


def require_origin(path: Path, root: Path, settings: Settings, configuration_hash: str) -> None:
    """Require that the trace and the plan are of what params.yaml and the user's files say now.

    Raises:
        PlanMismatchError: one has changed; the sentence names it.
        TableError: it is not known what the trace was made from.
    """
    origin = read_record(path, Origin)
    changed = _changed(json.loads(origin.parameters), json.loads(_parameters(settings)), "trace")
    now = content_hashes(root, origin.files)
    changed += [name for name, was in zip(origin.files, origin.hashes) if now.get(name) != was]
    if origin.configuration_hash != configuration_hash:
        changed.append(str(path.parent / "trace"))
    if changed:
        raise PlanMismatchError(
            f"{', '.join(changed[:4])} {'is' if len(changed) == 1 else 'are'} not what the plan was made from: run "
            "`dvc repro`, which plans again."
        )


def _parameters(settings: Settings) -> str:
    return json.dumps(settings.trace.model_dump(), sort_keys=True)


def _changed(before: object, now: object, key: str) -> list[str]:
    """Return the keys under which two values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        missing = object()
        return [
            found
            for name in sorted(before.keys() | now.keys())
            for found in _changed(before.get(name, missing), now.get(name, missing), f"{key}.{name}")
        ]
    return [] if before == now and type(before) is type(now) else [key]
