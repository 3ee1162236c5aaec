"""Files that parameters name and `dvc.yaml` does not: DVC would not notice when they change."""

from __future__ import annotations

from pathlib import Path

import yaml

from stowage.stages.settings import Settings, load_settings


def undeclared_inputs(root: Path) -> list[str]:
    """One sentence per file of the user's (model, loss, text, tokenizer) that a stage reads and does not depend on."""
    stages = yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    sentences = []
    for key, path, readers in _inputs(root, load_settings(root / "params.yaml")):
        missing = [name for name in readers if not _covered(root / path, root, stages.get(name, {}).get("deps", []))]
        if missing:
            sentences.append(
                f"{path} ({key}) is not among the deps of {' and '.join(missing)} in dvc.yaml, so that DVC will not "
                "notice when it changes: add it there."
            )
    return sentences


def input_paths(root: Path, settings: Settings) -> list[str]:
    """Relative paths of the user's files that `settings` name and that exist below `root`."""
    return [path for _, path, _ in _inputs(root, settings) if not Path(path).is_absolute()]


def _inputs(root: Path, settings: Settings) -> list[tuple[str, str, tuple[str, ...]]]:
    """(parameter, path, stages that read it) of files and folders that exist."""
    model, data = settings.trace.model, settings.train.data
    both, last = ("trace", "train"), ("train",)
    named = [
        ("trace.model.directory", model.directory, both),
        ("trace.model.callable", _module_path(root, model.callable), both),
        ("trace.loss", _module_path(root, settings.trace.loss), both),
        ("train.data.source", data.source, last),
        ("train.data.tokenizer", data.tokenizer, last),
    ]
    return [(key, path, readers) for key, path, readers in named if path and (root / path).exists()]


def _module_path(root: Path, function: str | None) -> str | None:
    """Where the module of `package.module:function` is, if it is the project's own."""
    if function is None:
        return None
    path = Path(*function.partition(":")[0].split("."))
    found = (candidate for candidate in (path.with_suffix(".py"), path / "__init__.py") if (root / candidate).is_file())
    return next((str(candidate) for candidate in found), None)


def _covered(path: Path, root: Path, deps: list[str]) -> bool:
    return any(path.resolve().is_relative_to((root / dep).resolve()) for dep in deps)
