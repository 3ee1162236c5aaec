"""Makes the rows of the rematerialization benchmark's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from stowage.flows.benchmarks.remat.names import TITLES
from stowage.flows.benchmarks.remat.rows import RematRow, accuracy_by_model
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
    close = accuracy_by_model(rows).with_columns(pl.col("model").replace(TITLES))
    return found | {"remat_accuracy": close.to_dicts()}
