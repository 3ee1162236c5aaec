"""Comparisons of plans on hand-made ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stowage.flows import compare as command
from stowage.flows.comparison import replan as _replan
from stowage.flows.comparison.changes import compare, render
from stowage.flows.comparison.two_plans import Side, read_side
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import MIB, TableError
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.plan import PlanRow, PlanSummary
from stowage.stages.ir.table import write_record, write_rows
from stowage.stages.ir.trace import Storage, TraceMeta, TraceTables, Value

SUMMARY = PlanSummary(
    plan_hash="p",
    configuration_hash="c",
    method="rockmate",
    device="a device",
    device_budget_bytes=100 * MIB,
    device_peak_bytes=80 * MIB,
    baseline_bytes=10 * MIB,
    step_time_s=2.0,
    lower_bound_s=1.0,
    recomputed_bytes=0,
    activation_bytes=50 * MIB,
    keep_all_peak_bytes=160 * MIB,
    keep_all_time_s=1.5,
    smallest_feasible_bytes=20 * MIB,
    solver="HiGHS 1",
    status="optimal",
    gap=0.0,
    time_limit_s=5.0,
    seed=0,
    estimated_nodes=0,
)
META = TraceMeta("c", "gpt2", "cpu", "2.13.0", 0, "AdamW", 1000)
OPERATIONS = ("addmm", "gelu")


def node(number: int, block: int, name: str) -> ComputeNode:
    return ComputeNode(number, (number,), (), (number,), (), "forward", block, False, False, 0.1, 0, False, name)


def row(number: int, node: int, recompute: bool) -> PlanRow:
    return PlanRow(number, "compute", node, -1, 0, "F0", recompute, 0.0, 0.1, 0, 0)


def side(again: set[int], blocks: int = 3) -> Side:
    """A chain of equal blocks of two operations; `again` are the nodes that run twice."""
    nodes = [node(2 * b + i, b, f"{op} model.h.{b}.mlp") for b in range(blocks) for i, op in enumerate(OPERATIONS)]
    return Side(
        meta=META,
        storages=[Storage(n.node, MIB, "temporary", n.name) for n in nodes],
        nodes=nodes,
        blocks=[Block(b, "hash", "{}", (), (), f"model.h.{b}", 0, ()) for b in range(blocks)],
        rows=[row(i, n.node, False) for i, n in enumerate(nodes)] + [row(99, n, True) for n in sorted(again)],
        summary=SUMMARY,
    )


def test_identical_blocks_are_one_line() -> None:
    changes = compare(side(again=set()), side(again={1, 3}))
    assert [(c.fate, c.recomputed, c.recomputed_bytes, labels) for c, labels in changes] == [
        ("changed", (("gelu model.h.*.mlp", 1),), MIB, ["model.h.0", "model.h.1"]),
        ("same", (), 0, ["model.h.2"]),
    ]


def test_the_reverse_is_kept() -> None:
    ((change, labels),) = compare(side(again={0, 2, 4}), side(again=set()))
    assert change.kept == (("addmm model.h.*.mlp", 1),)
    assert change.recomputed == ()
    assert len(labels) == 3


def test_new_and_removed_blocks() -> None:
    fates = {label: change.fate for change, labels in compare(side(set()), side(set(), blocks=4)) for label in labels}
    assert fates["model.h.3"] == "new"
    fates = {label: change.fate for change, labels in compare(side(set()), side(set(), blocks=2)) for label in labels}
    assert fates["model.h.2"] == "gone"


def test_the_report_has_ratios_and_says_whether_the_trace_changed() -> None:
    after = replace(side(again={1}), summary=replace(SUMMARY, step_time_s=3.0, device_peak_bytes=40 * MIB))
    text = render(side(set()), after, "main")
    assert "| predicted step | 2.0000 s | 3.0000 s | 1.500 |" in text
    assert "| predicted peak | 80.0 MiB | 40.0 MiB | 0.500 |" in text
    assert "The trace is unchanged." in text
    changed = replace(after, meta=replace(META, configuration_hash="d", parameters=2000))
    assert "**The trace changed**: gpt2 → gpt2, 1,000 → 2,000 parameters." in render(side(set()), changed, "main")
    assert "There is no plan at `main`" in render(None, after, "main")


def save(side: Side, folder: Path) -> None:
    loss = Value(0, 0, -1, 0, "float32", (), (), 0, "loss")
    TraceTables(side.storages, [loss], [], [], [], side.meta).save(folder / "trace")
    write_rows(folder / "partition" / "nodes.parquet", ComputeNode, side.nodes)
    write_rows(folder / "partition" / "blocks.parquet", Block, side.blocks)
    write_rows(folder / "solve" / "plan.parquet", PlanRow, side.rows)
    write_record(folder / "solve" / "summary.json", side.summary)


def test_sides_are_read_back(tmp_path: Path) -> None:
    save(side({1}), tmp_path)
    assert read_side(tmp_path) == side({1})
    (tmp_path / "solve" / "plan.parquet").write_bytes(b"no")
    with pytest.raises(TableError, match="damaged"):
        read_side(tmp_path)


def test_saved_folders_compare(tmp_path: Path) -> None:
    save(side(set()), tmp_path / "before")
    save(side({1}), tmp_path / "after")
    assert "gelu" in command.report(tmp_path, str(tmp_path / "before"), tmp_path / "after")


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A project whose target is a GPU that is not here; stages only note that they ran."""
    target = DeviceDescription("f", "a GPU", "cuda", 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    write_record(tmp_path / "artifacts" / "device.json", target)
    ran: list[str] = []
    monkeypatch.setattr(_replan, "reproduce", lambda root, stage, log: ran.append(stage))
    monkeypatch.setattr(_replan, "dvc_output", lambda root, *arguments: "")
    return tmp_path, ran


def test_a_changed_model_is_not_planned_from_another_machines_trace(
    foreign: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ran = foreign
    reasons = {"trace": [{"changed deps": {"params.yaml": {"trace.model": "modified"}}}]}
    monkeypatch.setattr(_replan, "changed_stages", lambda root, stages: reasons)
    with pytest.raises(_replan.NeedsDeviceError, match="needs a trace on the device"):
        _replan.replan(root, print, here={"cpu"})
    assert ran == []


def test_an_unchanged_model_is_solved_from_what_is_stored(
    foreign: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ran = foreign
    reasons = {"trace": [{"changed outs": {"artifacts/trace": "deleted"}}]}
    monkeypatch.setattr(_replan, "changed_stages", lambda root, stages: reasons)
    _replan.replan(root, print, here={"cpu"})
    assert ran == ["partition", "options", "solve", "codegen"]


def test_on_the_targets_kind_of_machine_every_stage_may_run(foreign: tuple[Path, list[str]]) -> None:
    root, ran = foreign
    _replan.replan(root, print, here={"cpu", "cuda"})
    assert ran[0] == "trace"
