"""Options that the commands of flows share, and mistakes as one sentence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer

from stowage.flows.pipeline.overrides import check, parse_assignments
from stowage.flows.pipeline.project import find_root
from stowage.stages.ir.command import INTERRUPTED_STATUS, USAGE_STATUS, one_line
from stowage.stages.ir.errors import StowageError

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter for this run only; may be repeated.")
]


def overrides_of(assignments: list[str] | None) -> dict[str, Any]:
    """Return the overrides of `--set` options, checked before anything is started.

    Raises:
        StowageError: one of them or `params.yaml` is wrong, or there is no project here.
    """
    overrides = parse_assignments(assignments or [])
    check(find_root(), overrides)
    return overrides


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with the sentence of a `StowageError`, without a traceback."""
    try:
        yield
    except StowageError as error:
        typer.echo(f"error: {one_line(str(error))}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        typer.echo(f"error: {error.strerror or error}{where}: nothing half-written was left behind.", err=True)
        raise typer.Exit(1) from None


def run_command(main: Callable[..., None]) -> NoReturn:
    """Run `main` with the options that its signature says; a mistake in them is one line and status 2."""
    application = typer.Typer(add_completion=False)
    application.command()(main)
    run_typer(application)


def run_typer(application: typer.Typer) -> NoReturn:
    """Run a program with the words of the command line; a mistake in them is one line and status 2."""
    command = typer.main.get_command(application)
    usage_error: Any = typer.BadParameter.__bases__[0]  # click's UsageError; typer may bring a click of its own
    try:
        status = command.main(standalone_mode=False)
    except usage_error as error:
        if said := error.format_message():
            typer.echo(f"error: {said} (`--help` says what there is)", err=True)
        sys.exit(USAGE_STATUS)
    except typer.Abort:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED_STATUS)
    sys.exit(status if isinstance(status, int) else 0)
