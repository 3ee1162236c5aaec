"""Does all that `stowage init` does, in order: nothing is written before everything is known to fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from stowage.flows.pipeline.dvc import dvc_command, python_command, run_quietly
from stowage.flows.pipeline.project import is_checkout, is_misplaced
from stowage.flows.starter.answers import Model, choose_model
from stowage.flows.starter.changes import FileChange, changes_of, text_hash, write
from stowage.flows.starter.repository import folder_in_repository, ignored_by_git, start_dvc
from stowage.stages.inputs import LIST, refresh
from stowage.stages.ir.code_record import RECORD, read_code, record_code
from stowage.stages.ir.command import DEVICE
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.files import write_atomically
from stowage.stages.settings import Settings, load_settings, parse_settings
from stowage.stages.settings.load import parse_yaml
from stowage.version import __version__

NEXT = (
    "now: `dvc repro` or `stowage train`; `stowage show` prints the result again; `git add -A && git commit` keeps it"
)


def start(
    root: Path,
    *,
    model: str | None,
    device: str | None,
    dry: bool,
    say: Callable[[str], None],
    ask: Callable[[str, str], str],
) -> None:
    """Make `root` a Stowage project, or bring one up to date.

    Args:
        root: its folder.
        model: the value of `--model`; None takes the one of `params.yaml` or of the project's own module, or asks.
        device: `cpu` or `cuda`; None for a GPU if there is one.
        dry: only say what would be done.
        say: receives a sentence for each thing that is done.
        ask: see `choose_model`.

    Raises:
        StowageError: something that is there is in the way; nothing has been written.
    """
    if is_checkout(root):
        raise StowageError(f"{root} is a checkout of Stowage itself, which has its pipeline: run `make run` there.")
    if is_misplaced(root):
        raise StowageError(
            f"{root / 'dvc.yaml'} belongs to a checkout of Stowage itself, whose folder `stages` is not here: delete "
            "it and run the same command again."
        )
    folder = folder_in_repository(root)
    dvc_command()
    chosen = choose_model(model, root, ask)
    record = read_code(root) or {}
    kind = device or _present_device(root) or _best_device()
    changes, left = changes_of(root, chosen, kind, folder, __version__, record.get("files", {}))
    settings = _checked(root, changes, chosen)
    _refuse_ignored(root)
    for change in changes:
        if not dry:
            write(root, change)
        say(change.describe() if not dry else f"would have: {change.describe()}")
    for kept in left:
        say(kept)
    if dry:
        return
    if sentence := start_dvc(root, folder):
        say(sentence)
    _measure(root, settings.trace.device, say)
    _record(root, changes, say)
    for sentence in refresh(root, settings):
        say(sentence)
    say(NEXT)


def _present_device(root: Path) -> str | None:
    """Return the device that `params.yaml` names."""
    path = root / "params.yaml"
    if not path.is_file():
        return None
    trace = (parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}).get("trace")
    return trace.get("device", "cpu") if isinstance(trace, dict) else None


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked(root: Path, changes: list[FileChange], model: Model) -> Settings:
    """Return the parameters as they will be.

    Raises:
        ParameterError: they are wrong, or name another model than was asked for.
    """
    text = next((c.after for c in changes if c.path == Path("params.yaml")), None)
    if text is None:
        settings = load_settings(root / "params.yaml")
    else:
        settings = parse_settings(parse_yaml(text, "params.yaml"), "params.yaml")
    named = getattr(settings.trace.model, model.kind)
    if named != model.value:
        raise ParameterError(
            f"params.yaml names another model than {model.value}: change trace.model there, to `{model.kind}: "
            f"{model.value}`, and run the same command again."
        )
    return settings


def _refuse_ignored(root: Path) -> None:
    """Refuse a repository where Git would not keep what DVC needs in it.

    Raises:
        StowageError: Git ignores such a file.
    """
    if ignored := ignored_by_git(root, [str(DEVICE), str(LIST), str(RECORD), "dvc.yaml", "params.yaml"]):
        raise StowageError(
            f"Git ignores {', '.join(ignored)}, which must be committed: take the line that says so out of .gitignore."
        )


def _measure(root: Path, kind: str, say: Callable[[str], None]) -> None:
    """Make this machine the target, unless the project has one."""
    if (root / DEVICE).is_file():
        return
    code, said = run_quietly(python_command("stowage.stages.device", kind), root)
    if code != 0:
        raise StowageError((said.splitlines() or ["the device cannot be measured"])[-1].removeprefix("error: "))
    say(f"measured this machine: {said.strip()}")


def _record(root: Path, changes: list[FileChange], say: Callable[[str], None]) -> None:
    """Record the version, the code of each stage, and what was written as a whole."""
    before = read_code(root)
    stale = record_code(root, __version__)
    if before is not None and stale:
        say(f"{RECORD} is of Stowage {__version__}; changed since {before['version']}: {', '.join(stale)}")
    elif before is None:
        say(f"wrote {RECORD}")
    ours = {c.path.as_posix(): text_hash(c.after) for c in changes if c.ours}
    content = read_code(root) or {}
    if ours and content.get("files", {}) | ours != content.get("files", {}):
        content["files"] = content.get("files", {}) | ours
        write_atomically(root / RECORD, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
