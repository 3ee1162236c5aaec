"""What the commands of flows share: options, and errors as one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from stowage.stages.ir.errors import StowageError

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter for this run only; may be repeated.")
]


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with the sentence of a `StowageError`, without a traceback."""
    try:
        yield
    except StowageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
