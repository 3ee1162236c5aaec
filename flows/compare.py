"""Compare the plan with an earlier one, for people's CI; a report in Markdown.

    python -m stowage.flows.compare --before origin/main
    python -m stowage.flows.compare --before origin/main --replan --markdown "$GITHUB_STEP_SUMMARY"
    python -m stowage.flows.compare --before .stowage/runs/9a3d540852bf

Exit status: 0 compared; 1 an error; 3 the model changed and needs a trace on a device that is not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stowage.flows.comparison.changes import render
from stowage.flows.comparison.replan import NeedsDeviceError, replan
from stowage.flows.comparison.two_plans import folder_of, read_side
from stowage.flows.pipeline.command import run_command
from stowage.flows.pipeline.git import git
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.errors import StowageError

NEEDS_DEVICE = 3
"""Exit status where the plan needs a trace on a device that is not here."""


def report(root: Path, before: str, after: Path) -> str:
    """Return the comparison of two plans as Markdown.

    Args:
        root: folder of the project.
        before: a folder laid out as `artifacts/` is, or a Git revision.
        after: such a folder.

    Raises:
        StowageError: the plan after cannot be read, or `before` names nothing.
    """
    new = read_side(after)
    if not (Path(before).is_dir() or _has_plan(root, before)):
        return render(None, new, before)
    try:
        with folder_of(root, before) as folder:
            return render(read_side(folder), new, before)
    except StowageError as error:
        return f"{render(None, new, before)}\n{error}\n"


def _has_plan(root: Path, revision: str) -> bool:
    try:
        git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except StowageError:
        raise StowageError(f"{revision} is neither a folder nor a Git revision: give one that has a plan.") from None
    return bool(git(root, "ls-tree", revision, "--", "dvc.lock"))


def main(
    before: Annotated[str, typer.Option(help="A Git revision, or a folder of saved artifacts.")] = "HEAD",
    after: Annotated[Path | None, typer.Option(help="A folder of artifacts; the project's own by default.")] = None,
    again: Annotated[bool, typer.Option("--replan", help="Bring the plan up to date first.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Append the report to this file as well.")] = None,
) -> None:
    """Compare the plan with an earlier one."""
    status = 0
    try:
        root = find_root()
        if again:
            replan(root, lambda line: typer.echo(line, err=True))
        text = report(root, before, after or root / "artifacts")
    except StowageError as error:
        status = NEEDS_DEVICE if isinstance(error, NeedsDeviceError) else 1
        text = f"## Plan\n\n{error}\n"
        typer.echo(f"error: {error}", err=True)
    else:
        typer.echo(text)
    if markdown is not None:
        with markdown.open("a", encoding="utf-8") as file:
            file.write(text)
    raise typer.Exit(status)


if __name__ == "__main__":
    run_command(main)
