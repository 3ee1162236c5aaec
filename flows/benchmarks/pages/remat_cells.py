"""Makes the rows of the rematerialization benchmark's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.remat.names import TITLES
from stowage.flows.benchmarks.remat.rows import CLOSE_TIME, RematRow, measured_plans
from stowage.flows.benchmarks.remat.summary import beside_methods, beside_peers, by_share
from stowage.stages.ir.table import read_rows

TABLES = {
    "remat_peers": (beside_peers, ("plain", "checkpoint", "there", "memory_budget", "there_too")),
    "remat_shares": (by_share, ("65%", "50%", "30%", "smallest")),
    "remat_methods": (beside_methods, ("65%", "50%", "30%", "smallest", "chen")),
}
"""Section -> the function that makes the cells of a model, and the keys of these cells."""


def remat_sections(results: Path) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Read `remat.parquet` and make the rows of every section."""
    rows = read_rows(results / "remat.parquet", RematRow)
    models = list(dict.fromkeys(r.model for r in rows))
    found: dict[str, Sequence[Mapping[str, Any]]] = {
        section: [{"model": TITLES.get(m, m), **dict(zip(keys, cells(rows, m), strict=True))} for m in models]
        for section, (cells, keys) in TABLES.items()
    }
    return found | {"remat_accuracy": [row for m in models if (row := _accuracy(rows, m))]}


def _accuracy(rows: Sequence[RematRow], model: str) -> dict[str, Any]:
    """Say how close the predictions of a model's plans came; nothing where none was measured."""
    errors = [r.over_prediction - 1 for r in measured_plans([r for r in rows if r.model == model])]
    if not errors:
        return {}
    close = sum(abs(error) <= CLOSE_TIME for error in errors)
    spread = {"least": min(errors), "most": max(errors)}
    return {"model": TITLES.get(model, model), "plans": len(errors), "close": close, **spread}
