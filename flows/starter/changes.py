"""Decides what `stowage init` writes, and what it leaves as it is."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stowage.flows.starter.answers import Model, module_file, names_in
from stowage.flows.starter.merge import (
    outputs_in_cache,
    with_deployments,
    with_keys,
    with_lines,
    with_sections,
    with_stages,
)
from stowage.flows.starter.templates import WORKFLOW, parameters, template, workflow
from stowage.stages.inputs.named import SOURCE_FOLDERS
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.files import write_atomically


@dataclass(frozen=True)
class FileChange:
    """A file that is written.

    Attributes:
        path: path from the folder in which `stowage init` runs.
        before: its text, None where it is not there.
        after: its text from now on.
        ours: the whole file is Stowage's, and its hash is kept to see whether people have edited it.
    """

    path: Path
    before: str | None
    after: str
    ours: bool = False

    def describe(self) -> str:
        """Say what is done, with a diff of what was there."""
        if self.before is None:
            return f"wrote {self.path}"
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        shown = [f"    {line}" for line in lines if not line.startswith(("---", "+++", "@@"))]
        return "\n".join([f"updated {self.path}:", *shown])


def text_hash(text: str) -> str:
    """Return the hash of a file that is Stowage's as a whole."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changes_of(
    root: Path, model: Model, device: str, folder: str, version: str, written: Mapping[str, str]
) -> tuple[list[FileChange], list[str]]:
    """Return files to write, and sentences on what is left alone.

    Args:
        root: the project's folder.
        model: the model that it plans.
        device: `cpu` or `cuda`.
        folder: path of `root` in its repository.
        version: version of Stowage.
        written: path -> hash of files that are Stowage's as a whole, as they were last written.

    Raises:
        StowageError: a file that is there cannot be joined with what is wanted.
    """
    found: list[FileChange] = []
    left: list[str] = []
    data = _model_file(root, model, found)
    wanted = parameters(model, device, data)
    stages = template("dvc.yaml")
    _join(
        found,
        root,
        "params.yaml",
        wanted,
        lambda text, new, path: with_keys(with_sections(text, new, path), new, stages, path),
    )
    _join(found, root, "dvc.yaml", stages, with_stages)
    name = root.resolve().name or "project"
    _join(found, root, "prefect.yaml", template("prefect.yaml", name=_plain_name(name)), with_deployments)
    ignored = "\n".join([template("gitignore").rstrip("\n"), *outputs_in_cache(stages), ""])
    for path, wanted in ((".gitignore", ignored), (".dvcignore", template("dvcignore"))):
        _join(found, root, path, wanted, lambda text, lines, _: with_lines(text, lines))
    _whole(found, left, root, _workflow_path(folder), workflow(root, folder, version), written)
    return found, left


def write(root: Path, change: FileChange) -> None:
    """Write a file, in one step."""
    path = root / change.path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, change.after.encode())


def _model_file(root: Path, model: Model, found: list[FileChange]) -> str | None:
    """Return the function that makes batches, if the model's module has one; a missing module becomes an example."""
    if model.kind != "callable":
        return None
    path = module_file(root, model.module)
    if path is None:
        path = _place_of(root, model.module)
        found.append(FileChange(path, None, template("my_model.py", build=model.function)))
        return f"{model.module}:batches"
    names = names_in(root / path)
    if model.function not in names:
        raise StowageError(
            f"{path} has no function {model.function}: write one that returns (model, sample batch as keyword "
            "arguments), or name another with --model module:function."
        )
    return f"{model.module}:batches" if "batches" in names else None


def _place_of(root: Path, module: str) -> Path:
    """Return where a missing module belongs: in `src` in projects that keep their packages there."""
    path = Path(*module.split(".")).with_suffix(".py")
    first = path.parts[0]
    for folder in SOURCE_FOLDERS:
        if len(path.parts) > 1 and (root / folder / first).is_dir():
            return Path(folder) / path
    return Path("src") / path if (root / "src").is_dir() else path


def _join(found: list[FileChange], root: Path, name: str, wanted: str, join: Callable[[str, str, str], str]) -> None:
    path = root / name
    if not path.is_file():
        found.append(FileChange(Path(name), None, wanted))
        return
    text = _read(path)
    if (after := join(text, wanted, str(path))) != text:
        found.append(FileChange(Path(name), text, after))


def _whole(
    found: list[FileChange], left: list[str], root: Path, name: str, wanted: str, written: Mapping[str, str]
) -> None:
    path = root / name
    if not path.is_file():
        found.append(FileChange(Path(name), None, wanted, ours=True))
        return
    text = _read(path)
    if text == wanted:
        return
    if written.get(name) == text_hash(text):
        found.append(FileChange(Path(name), text, wanted, ours=True))
    else:
        left.append(
            f"left {name} as it is, because it was edited: delete it and run `stowage init` again to have it as "
            "Stowage writes it now"
        )


def _workflow_path(folder: str) -> str:
    """Return the workflow's path: workflows are at the top of a repository, wherever the project is in it."""
    depth = 0 if folder == "." else len(Path(folder).parts)
    name = WORKFLOW if depth == 0 else WORKFLOW.replace("stowage", f"stowage-{Path(folder).name}")
    return "../" * depth + name


def _plain_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StowageError(f"{path} cannot be read ({error}): make it a readable UTF-8 text file.") from error
