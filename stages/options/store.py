"""Content-addressed store of options: one Parquet file per block and way of solving, only ever added to."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stowage.stages.formulations.block import checkmate, retention
from stowage.stages.formulations.block.greedy import selective
from stowage.stages.formulations.block.rk_checkmate import model as rk_checkmate
from stowage.stages.formulations.block.tw_remat import solve as tw_remat
from stowage.stages.formulations.cluster import budgets as h_budgets
from stowage.stages.formulations.cluster import policies as h_policies
from stowage.stages.formulations.cluster import rotor as h_rotor
from stowage.stages.formulations.cluster.retention import solve as h_retention
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.errors import IllegalPlanError, TableError
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option
from stowage.stages.ir.table import read_rows, write_rows
from stowage.stages.options.tasks import GridSize
from stowage.stages.simulate.last_run import with_costs, with_tail_costs
from stowage.stages.solver.cp import cp_version
from stowage.stages.solver.milp import milp_version
from stowage.stages.solver.outcome import SolverSettings

VERSION = "10"
FORMULATIONS = (
    retention,
    rk_checkmate,
    checkmate,
    selective,
    tw_remat,
    h_budgets,
    h_retention,
    h_policies,
    h_rotor,
)


def option_key(block_hash: str, size: GridSize, settings: SolverSettings, clusters: Sequence[BlockCluster] = ()) -> str:
    """Names a block's options: what was solved, how, by which code and solver."""
    content = {
        "block": block_hash,
        "size": asdict(size),
        "settings": asdict(settings),
        "clusters": [c.children for c in clusters],
        "versions": [VERSION, *(module.VERSION for module in FORMULATIONS), cp_version(), milp_version()],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def block_key(
    graph: BlockGraph, size: GridSize, settings: SolverSettings, clusters: Sequence[BlockCluster] = ()
) -> str:
    """The same for a block; clusters count where it is too large to be solved as it is."""
    large = len(graph.nodes) > size.max_exact_nodes
    return option_key(graph.content_hash(), size, settings, clusters if large else ())


@dataclass(frozen=True)
class OptionStore:
    """Options under `folder`, `<key>.parquet` each."""

    folder: Path

    def path(self, key: str) -> Path:
        """Where options with this key are or will be."""
        return self.folder / f"{key}.parquet"

    def get(self, key: str, graph: BlockGraph) -> list[Option] | None:
        """Stored options of `graph`, checked by the referee; None where there are none that can be trusted.

        A damaged file is as good as none: its content can be solved again, and is then replaced.
        """
        if not self.path(key).exists():
            return None
        name = graph.content_hash()
        try:
            options = read_rows(self.path(key), Option)
            for position, option in enumerate(options):
                judged = with_tail_costs(with_costs(option, graph), graph)
                if judged != option or (option.block_hash, option.option) != (name, position):
                    return None
                if not 0 <= option.gap < math.inf:
                    return None
        except (TableError, IllegalPlanError, IndexError):
            return None
        return options or None

    def put(self, key: str, options: list[Option]) -> None:
        """Store options, atomically."""
        write_rows(self.path(key), Option, options)
