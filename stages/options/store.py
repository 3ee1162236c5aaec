"""Content-addressed store of options: one Parquet file per block and way of solving, only ever added to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.code import code_hash, versions_of
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.options.sources import SOURCES
from stowage.stages.options.tasks import GridSize
from stowage.stages.solver.outcome import SolverSettings

DECIDING = tuple(
    f"stowage.stages.{name}"
    for name in (
        "formulations.block",
        "formulations.chain",
        "formulations.cluster",
        "ir",
        "options",
        "simulate",
        "solver",
    )
)
"""Packages whose code decides what a block's options are; `formulations.offload` uses options, and makes none."""

LIBRARIES = ("highspy", "networkx", "numpy", "ortools", "pulp")
"""Libraries whose version may change the options."""


def code_of_options() -> tuple[str, ...]:
    """Name the code that makes options, that of formulations elsewhere included, and the solvers."""
    return code_hash(*DECIDING, *(source.code for source in SOURCES)), *versions_of(*LIBRARIES)


def option_key(block_hash: str, size: GridSize, settings: SolverSettings, clusters: Sequence[BlockCluster] = ()) -> str:
    """Name a block's options by what was solved, how, and by which code and solver."""
    content = {
        "block": block_hash,
        "size": asdict(size),
        "settings": asdict(settings),
        "clusters": [c.children for c in clusters],
        "code": code_of_options(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def block_key(
    graph: BlockGraph, size: GridSize, settings: SolverSettings, clusters: Sequence[BlockCluster] = ()
) -> str:
    """Name a block's options; clusters count only where it is too large to be solved whole."""
    large = len(graph.nodes) > size.max_exact_nodes
    return option_key(graph.content_hash(), size, settings, clusters if large else ())


@dataclass(frozen=True)
class OptionStore:
    """Keeps options under `folder`, one `<key>.parquet` per block and way of solving."""

    folder: Path

    def path(self, key: str) -> Path:
        """Return the path of options with this key."""
        return self.folder / f"{key}.parquet"

    def get(self, key: str, graph: BlockGraph) -> list[Option] | None:
        """Return stored options of `graph`; None where there are none that can be trusted.

        A damaged file counts as missing: its content can be solved again, and is then replaced. The referee has judged
        options before they are stored, the file's digest says that they are those, and plans made of them are judged.
        """
        if not self.path(key).exists():
            return None
        name = graph.content_hash()
        try:
            options = read_rows(self.path(key), Option)
        except TableError:
            return None
        if any((o.block_hash, o.option) != (name, position) for position, o in enumerate(options)):
            return None
        return options or None

    def put(self, key: str, options: list[Option]) -> None:
        """Store options, atomically."""
        write_rows(self.path(key), Option, options)
