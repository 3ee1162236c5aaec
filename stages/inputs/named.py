"""Finds files and folders that parameters name: model, loss, batches, text, tokenizer."""

from __future__ import annotations

from pathlib import Path

from stowage.stages.settings import Settings

TRACE, TRAIN = "trace", "train"
READERS = (TRACE, TRAIN)
"""Stages that read what is the user's own."""
SOURCE_FOLDERS = ("", "src")
"""Folders of the project that modules are imported from."""


def named_inputs(root: Path, settings: Settings) -> dict[str, set[str]]:
    """Return existing paths that `settings` name, by the stage that reads them, relative to `root` where inside."""
    model, data = settings.trace.model, settings.train.data
    both = {model.directory, _module_file(root, model.callable), _module_file(root, settings.trace.loss)}
    found = {TRACE: both, TRAIN: both | {_module_file(root, data.callable), data.source, data.tokenizer}}
    return {reader: {_relative(root, p) for p in paths if p and (root / p).exists()} for reader, paths in found.items()}


def _module_file(root: Path, function: str | None) -> str | None:
    """Return the file of the module of `package.module:function`, if it is the project's own."""
    if function is None:
        return None
    path = Path(*function.partition(":")[0].split("."))
    candidates = (Path(f) / p for f in SOURCE_FOLDERS for p in (path / "__init__.py", path.with_suffix(".py")))
    return next((candidate.as_posix() for candidate in candidates if (root / candidate).is_file()), None)


def _relative(root: Path, path: str) -> str:
    """Return a path as `dvc.yaml` names it."""
    normal = Path(path)
    if normal.is_absolute() and normal.resolve().is_relative_to(root.resolve()):
        normal = normal.resolve().relative_to(root.resolve())
    return normal.as_posix()
