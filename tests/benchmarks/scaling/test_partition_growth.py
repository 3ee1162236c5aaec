"""The benchmark of H-Partition: rows, the picture, and that work grows with the graph and no faster."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import pytest

from stowage.flows.benchmarks.scaling.partition_figure import THESIS, partition_figure
from stowage.flows.benchmarks.scaling.partition_growth import PartitionGrowthRow, measure, run_partition_growth
from stowage.flows.benchmarks.scaling.synthetic_graphs import SHAPES
from stowage.stages.ir.table import read_rows
from stowage.stages.partition.clusters.level import Level


def test_a_row_tells_what_came_out() -> None:
    row = measure("transformer", 2000)
    assert 1900 < row.nodes <= 2000
    assert row.top <= 30
    assert row.largest <= 20
    assert row.levels >= 3
    assert row.distinct < row.clusters / 3
    assert row.score > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_borders_looked_at_grow_with_the_nodes(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds depend on the machine; the values that evaluations of equation 3.1 go through do not."""
    looked_at: list[int] = []
    plain = Level.interface_bytes

    def counted(level: Level, groups: Sequence[int]) -> int:
        looked_at.append(sum(len(level.reads[g]) + len(level.makes[g]) for g in groups))
        return plain(level, groups)

    monkeypatch.setattr(Level, "interface_bytes", counted)
    per_node: list[float] = []
    for size in (1_500, 9_000):
        looked_at.clear()
        nodes = measure(shape, size).nodes
        per_node.append(sum(looked_at) / nodes)
    assert per_node[0] > 1
    assert per_node[1] <= 2 * per_node[0]  # one level more; six times the nodes


@pytest.mark.long
def test_rows_and_the_picture_are_written(tmp_path: Path) -> None:
    said: list[str] = []
    closing = run_partition_growth(tmp_path, said.append, sizes=(300, 900))
    rows = read_rows(tmp_path / "partition.parquet", PartitionGrowthRow)
    assert [(r.shape, r.nodes > 500) for r in rows] == [(shape, large) for large in (False, True) for shape in SHAPES]
    assert len(said) == len(rows)
    assert [line.split(":")[0] for line in closing.splitlines()] == list(SHAPES)
    assert matplotlib.image.imread(io.BytesIO((tmp_path / "partition.png").read_bytes())).shape[1] == 1050


def test_the_picture_has_a_line_a_shape_and_the_number_of_the_thesis() -> None:
    shapes = {"chain": [(1000, 0.5), (10_000, 5.0)], "net": [(1100, 0.2), (11_000, 2.5)]}
    (axes,) = partition_figure(shapes).axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    lines = {line.get_label(): [tuple(point) for point in line.get_xydata().tolist()] for line in axes.lines}
    assert lines == shapes | {"linear": [(1000, 0.5), (11_000, 5.5)], "thesis, 2 hours": [THESIS]}
