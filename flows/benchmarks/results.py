"""Says where benchmarks write their results, and publishes them as pages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from stowage.flows.pipeline.command import one_sentence
from stowage.flows.pipeline.project import find_root

OUT = Path("artifacts") / "benchmark"
"""Folder of results, in the project."""


@contextlib.contextmanager
def results_of(benchmark: str, pages: Path | None) -> Iterator[Path]:
    """Give a benchmark its folder, and write pages from what it left there; mistakes are one sentence.

    Args:
        benchmark: its name, as in `READERS`.
        pages: a folder of pages, docs/measured, or None to write none.
    """
    with one_sentence():
        out = find_root() / OUT
        yield out
        if pages is not None:
            from stowage.flows.benchmarks.pages.publish import publish

            for path in publish(benchmark, out, pages.resolve(), command_line(sys.argv[1:])):
                typer.echo(path)


def command_line(words: list[str]) -> str:
    """Say how the benchmark was called, without where its pages go."""
    given = [word for word in words if not word.startswith("--write=") and word != "benchmark"]
    if "--write" in given:
        at = given.index("--write")
        given = given[:at] + given[at + 2 :]
    return " ".join(["python -m stowage.flows.benchmark", *given])
