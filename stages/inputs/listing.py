"""Reads and writes `artifacts/inputs.yaml`, the generated list, and the deps of `dvc.yaml` that it stands for."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from stowage.stages.inputs.named import READERS
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.files import UnwritableError, write_atomically

LIST = Path("artifacts/inputs.yaml")
PIPELINE = Path("dvc.yaml")
_OURS = (Path("artifacts"), Path(__file__).resolve().parents[1])
"""Folders of deps that are results or code of stages."""
_HEAD = """\
# Files that the model and data of params.yaml are made of. Written by `trace`, the flows and
# `python -m stowage.stages.inputs`, which put each of them among the deps of its stage in dvc.yaml; not by hand.
"""


_NOT_YAML = (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, YAMLError)


class StaleInputsError(StowageError):
    """Raised when `dvc.yaml` did not name all that a stage reads; it has been mended before."""


def listed_inputs(root: Path) -> dict[str, list[str]]:
    """Return the files of the generated list, by the stage that reads them.

    Raises:
        StowageError: the list is damaged.
    """
    path = root / LIST
    content = _load(path) if path.is_file() else {}
    listed = {reader: content.get(reader) or [] for reader in READERS} if isinstance(content, Mapping) else None
    if listed is None or not all(isinstance(paths, list) for paths in listed.values()):
        raise StowageError(
            f"{path} is not a list of files: delete it, and `python -m stowage.stages.inputs` renews it."
        )
    return {reader: [str(path) for path in paths] for reader, paths in listed.items()}


def added_inputs(root: Path, reader: str) -> set[str]:
    """Return files and folders that people wrote among the deps of a stage in `dvc.yaml`: data that their code reads.

    Raises:
        StowageError: `dvc.yaml` is damaged.
    """
    pipeline = root / PIPELINE
    content = _load(pipeline) if pipeline.is_file() else {}
    stages = content.get("stages") if isinstance(content, Mapping) else None
    stage = stages.get(reader) if isinstance(stages, Mapping) else None
    deps = (stage.get("deps") or []) if isinstance(stage, Mapping) else []
    known = {*listed_inputs(root)[reader], *(str(path) for path in _OURS)}
    return {str(dep) for dep in deps if not covers(root, known, str(dep)) and (root / str(dep)).exists()}


def write_inputs(root: Path, wanted: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Make the list and `dvc.yaml` name `wanted` (reader -> paths), and what people wrote into `dvc.yaml` besides.

    Files are written only where something changes. A folder that has no `dvc.yaml`, or a stage that it lacks, is left
    alone.

    Returns:
        Reader -> paths that DVC did not know of as dependencies of that stage.

    Raises:
        StowageError: a file cannot be read or written.
    """
    pipeline = root / PIPELINE
    if not pipeline.is_file():
        return {}
    try:
        text = pipeline.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StowageError(f"{pipeline} cannot be read ({_line(error)}): restore it with `git checkout`.") from error
    content, style = _load_with_style(text, pipeline)
    before, after = listed_inputs(root), dict[str, list[str]]()
    unknown: dict[str, list[str]] = {}
    changed = False
    for reader in READERS:
        stage = content.get("stages", {}).get(reader)
        if not isinstance(stage, dict):
            after[reader] = before[reader]
            continue
        deps = stage.setdefault("deps", [])
        by_hand = [dep for dep in deps if dep not in before[reader]]
        after[reader] = sorted({path for path in wanted[reader] if not covers(root, by_hand, path)})
        if new := [path for path in after[reader] if path not in deps]:
            unknown[reader] = new
        if deps != [*by_hand, *after[reader]]:
            for path in before[reader]:
                if path in deps:
                    deps.remove(path)  # changed in place, because comments belong to the entries that stay
            deps.extend(after[reader])
            changed = True
    if changed:
        _write(pipeline, _dumped(content, style))
    if after != before or (changed and not (root / LIST).is_file()):
        _write(root / LIST, _HEAD + _dumped(after, _style(2)))
    return unknown


def state(root: Path) -> tuple[bytes, ...]:
    """Return the content of the list and of `dvc.yaml`, to see whether a stage has mended them."""
    return tuple(path.read_bytes() if path.is_file() else b"" for path in (root / LIST, root / PIPELINE))


def covers(root: Path, deps: Iterable[str], path: str) -> bool:
    """Return whether `path` is one of `deps` or in a folder that is."""
    place = (root / path).resolve()
    return any(place.is_relative_to((root / dep).resolve()) for dep in deps)


def _load(path: Path) -> Any:
    try:
        return YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except _NOT_YAML as error:
        raise StowageError(f"{path} cannot be read ({_line(error)}): restore it with `git checkout`.") from error


def _load_with_style(text: str, path: Path) -> tuple[Any, YAML]:
    """Return the content with its comments, and a writer that indents as the file does."""
    try:
        content, _, offset = load_yaml_guess_indent(text, yaml=_style(0))
    except _NOT_YAML as error:
        raise StowageError(f"{path} is not valid YAML ({_line(error)}): mend it.") from error
    if not isinstance(content, dict):
        raise StowageError(f"{path} must be a mapping with `stages`: restore it with `git checkout`.")
    return content, _style(offset or 0)


def _style(offset: int) -> YAML:
    writer = YAML()
    writer.indent(mapping=2, sequence=offset + 2, offset=offset)
    writer.preserve_quotes = True
    writer.width = 1 << 20
    return writer


def _dumped(content: Any, style: YAML) -> str:
    stream = io.StringIO()
    style.dump(content, stream)
    return stream.getvalue()


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except UnwritableError as error:
        raise StowageError(f"{path} should name files that the model is made of: {error}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
