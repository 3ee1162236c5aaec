"""Keeps `artifacts/stowage.json`: the version of Stowage, and the code of each stage, that planned a project.

The file is committed and `dvc.yaml` tracks its entries, so that a new version of the package makes stale exactly the
stages whose code it changed. A checkout of Stowage has no such file: its `dvc.yaml` names the code itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.own_code import STAGES, package_hash, stage_hash

RECORD = Path("artifacts/stowage.json")


class OtherCodeError(StowageError):
    """The project's record was of another version of Stowage and has been rewritten for the installed one."""


def read_code(root: Path) -> dict[str, Any] | None:
    """Return the record of a project; None where there is none.

    Raises:
        StowageError: the record is damaged.
    """
    path = root / RECORD
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content["stages"], dict) and isinstance(content["version"], str):
            return dict(content)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise StowageError(f"{path} is damaged: delete it, and `stowage init` writes it again.")


def record_code(root: Path, version: str) -> list[str]:
    """Make the record of a project match the code that is installed now.

    Returns:
        Stages whose code differs from the record's; all of them where there was no record.
    """
    before = read_code(root) or {}
    package = package_hash()
    if before.get("package") == package and before.get("version") == version:
        return []
    old = before.get("stages", {})
    new = old if before.get("package") == package else {stage: stage_hash(stage) for stage in STAGES}
    content = {**before, "version": version, "package": package, "stages": new}
    write_atomically(root / RECORD, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    return [stage for stage in STAGES if old.get(stage) != new[stage]]


def renew_code(root: Path) -> list[str]:
    """Bring an existing record of a project up to date, and return a sentence that says so if it was not."""
    before = read_code(root)
    if before is None:
        return []
    from stowage.version import __version__

    changed = record_code(root, __version__)
    if not changed:
        return []
    return [f"{RECORD} is of Stowage {__version__} now; changed since {before['version']}: {', '.join(changed)}."]


def require_recorded(root: Path, stage: str) -> None:
    """Refuse to run a stage whose code differs from the project's record, from which DVC knows it.

    Raises:
        OtherCodeError: the code differs; the record is corrected, so that the same command then runs the stage.
    """
    before = read_code(root)
    if before is None or before.get("package") == package_hash():
        return
    from stowage.version import __version__

    changed = record_code(root, __version__)
    if stage in changed:
        raise OtherCodeError(
            f"{RECORD} was of Stowage {before['version']}, and other code, of {__version__}, is installed: it now "
            f"says so for {', '.join(changed)}; run the same command again."
        )
