"""Exact rewrites of a trace: other calls, the same numbers. Planning tries each and keeps the better plan.

`plain` is the trace as it was recorded. `packed` stores dropout masks as bytes (see `masks`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite.masks import pack_masks

VARIANTS: dict[str, Callable[[TraceTables], TraceTables]] = {PLAIN: lambda trace: trace, "packed": pack_masks}
"""Name -> rewrite, in the order of preference between equally fast plans. Where one does not apply it returns the very
trace that it was given: it is known by that, since another trace may have as many calls."""


def variants_of(trace: TraceTables) -> dict[str, TraceTables]:
    """The trace and every rewrite that changes it, by name."""
    found = {PLAIN: trace}
    for name, rewrite in VARIANTS.items():
        rewritten = rewrite(trace)
        if rewritten is not trace:
            found[name] = rewritten
    return found


def load_variant(folder: Path, variant: str) -> TraceTables:
    """Read a trace and rewrite it; `variant` is its name with that of its chain (see `VariantName`).

    Raises:
        TableError: a table is missing or damaged.
    """
    name = VariantName.of(variant).rewrite
    if name not in VARIANTS:
        raise TableError(f"{folder}: there is no rewrite {name!a} of a trace: run the solve stage (`dvc repro`).")
    return VARIANTS[name](TraceTables.load(folder))
