"""Plans by clusters of several sizes: a tiny run, the table, the picture, and the command's options."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

from stowage.flows.benchmarks.scaling.cluster_sizes import (
    SHARES,
    SIZES,
    ClusterSizeJob,
    ClusterSizeRow,
    cluster_size_job,
    limits_of,
    markdown_of,
    run_cluster_sizes,
)
from stowage.flows.benchmarks.scaling.clusters_figure import clusters_figure
from stowage.flows.planning.step import QUICK
from stowage.stages.ir.errors import MIB, ParameterError
from stowage.stages.ir.table import read_rows
from stowage.stages.partition import Limits


@pytest.mark.long
def test_a_tiny_run(tmp_path: Path) -> None:
    """A small and a large size: other clusters, other plans, both within the budget."""
    said: list[str] = []
    job = ClusterSizeJob(("mixer",), ("hiremate",), (4, 16), (0.6, 0.02), "tiny", 3, QUICK)
    table = run_cluster_sizes(job, tmp_path, said.append)
    rows = read_rows(tmp_path / "cluster_sizes.parquet", ClusterSizeRow)
    assert [(r.cluster_size, r.top_size, r.share) for r in rows] == [
        (4, 6, 0.6),
        (4, 6, 0.02),
        (16, 24, 0.6),
        (16, 24, 0.02),
    ]
    small, impossible, large, _ = rows
    assert small.clusters > large.clusters >= large.distinct > 0
    assert small.levels > large.levels
    for r in (small, large):
        assert r.note == ""
        assert 0 < r.peak_bytes <= r.budget_bytes
        assert r.activation_share <= 0.6
        assert r.overhead > 0
        assert r.options_s > 0
        assert r.solve_s > 0
        assert r.options_wall_s > 0
    assert impossible.note.startswith("the smallest feasible is ")
    assert impossible.overhead != impossible.overhead
    assert len(said) == len(rows)
    assert (tmp_path / "cluster_sizes.md").read_text() == table + "\n"
    assert matplotlib.image.imread(io.BytesIO((tmp_path / "cluster_sizes.png").read_bytes())).shape[1] == 900


def test_the_table_has_a_line_a_size() -> None:
    row = ClusterSizeRow(
        "gpt2", "h_ilp", 8, 12, 0.3, 99, 7, 5, 2, 2 * MIB, MIB, 0.29, 0.125, "h_ilp", 4.0, 3.0, 1.0, 0.5
    )
    rows = [row, replace(row, share=0.5, overhead=0.05, solve_s=2.0), replace(row, cluster_size=20, note="too little")]
    head, _, small, large, _, _ = markdown_of(rows).splitlines()
    assert head.startswith(
        "| model | method | M^l, M^t | clusters (distinct) | levels | overhead at 30% | overhead at 50% |"
    )
    assert small == "| gpt2 | h_ilp | 8, 12 | 7 (5) | 2 | +12.5% | +5.0% | 4.0 s (3.0 s) | 1.5 s (0.5 s) |"
    assert large == "| gpt2 | h_ilp | 20, 12 | 7 (5) | 2 | – |  | 4.0 s (3.0 s) | 1.0 s (0.5 s) |"


def test_the_picture_has_overhead_above_and_time_below() -> None:
    overheads = {"gpt2": {("hiremate", "30%"): [(8, 20.0), (20, 18.0)], ("h_ilp", "30%"): [(8, 21.0)]}}
    seconds = {"gpt2": {"hiremate": [(8, 3.0), (20, 5.0)]}, "unet": {"hiremate": [(8, 1.0)]}}
    figure = clusters_figure(overheads, seconds)
    above, empty, lower_tier, _ = figure.axes
    assert [line.get_xydata().tolist() for line in above.lines] == [[[8, 20], [20, 18]], [[8, 21]]]
    assert [line.get_xydata().tolist() for line in lower_tier.lines] == [[[8, 3], [20, 5]]]
    assert (above.get_title(), empty.get_title()) == ("gpt2", "unet")
    assert len(empty.lines) == 0
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["hiremate, 30%", "h_ilp, 30%", "hiremate, time"]


def test_options_of_the_command() -> None:
    assert cluster_size_job("", "", "", "", "", quick=False) == ClusterSizeJob(sizes=SIZES, shares=SHARES)
    job = cluster_size_job("unet", "h_ilp", "20, 8", "50%,70", "2", quick=True)
    assert (job.models, job.methods, job.sizes, job.shares) == (("unet",), ("h_ilp",), (8, 20), (0.5, 0.7))
    assert (job.depth, job.effort) == (2, QUICK)
    assert limits_of(20) == Limits(), "the size that planning takes by itself"
    for wrong, message in (
        (("resnet", "", "", "", ""), "--models names resnet: take some of unet"),
        (("", "auto", "", "", ""), "--methods names auto: cluster-sizes takes hiremate, h_retention, h_ilp"),
        (("", "", "1,x", "", ""), "--sizes names 1, x"),
        (("", "", "", "half", ""), "--shares"),
        (("", "", "", "", "2,4"), "--layers is 2,4"),
    ):
        with pytest.raises(ParameterError, match=message):
            cluster_size_job(*wrong, quick=False)
