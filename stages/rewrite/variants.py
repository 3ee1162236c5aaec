"""Exact rewrites of a trace: other calls, the same numbers. Planning tries each and keeps the better plan.

`plain` is the trace as it was recorded. `packed` stores dropout masks as bytes (see `masks`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite.masks import pack_masks

VARIANTS: dict[str, Callable[[TraceTables], TraceTables]] = {"plain": lambda trace: trace, "packed": pack_masks}
"""Name -> rewrite, in the order of preference between equally fast plans."""


def variants_of(trace: TraceTables) -> dict[str, TraceTables]:
    """The trace and every rewrite that changes it, by name."""
    found = {"plain": trace}
    for name, rewrite in VARIANTS.items():
        rewritten = rewrite(trace)
        if len(rewritten.calls) != len(trace.calls):
            found[name] = rewritten
    return found


def load_variant(folder: Path, variant: str) -> TraceTables:
    """Read a trace and rewrite it; `variant` may name a chain of blocks too (see `partition`), after a plus sign.

    Raises:
        TableError: a table is missing or damaged.
    """
    name = rewrite_of(variant)
    if name not in VARIANTS:
        raise TableError(f"{folder}: there is no rewrite {name!a} of a trace: run the solve stage (`dvc repro`).")
    return VARIANTS[name](TraceTables.load(folder))


def rewrite_of(variant: str) -> str:
    """The rewrite of a variant's trace."""
    return variant.partition("+")[0]
