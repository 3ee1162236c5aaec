"""What the commands of flows share: options, and errors as one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from stowage.flows._overrides import check, parse_assignments
from stowage.flows._project import find_root
from stowage.stages.ir.errors import StowageError

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter for this run only; may be repeated.")
]


def overrides_of(assignments: list[str] | None) -> dict[str, Any]:
    """The overrides that `--set` options stand for, checked before anything is started.

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
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
