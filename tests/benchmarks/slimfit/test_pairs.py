"""Techniques in pairs and all at once: each combination is one plan, whose peak is the measured one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.flows.benchmarks.slimfit.pair_job import TECHNIQUES, PairRow, PairSize
from stowage.flows.benchmarks.slimfit.pairs import PAPER, combinations, measured_pairs
from stowage.stages.rewrite.lossy import saved as saved_module

CLOSE_BYTES = 1 << 20


def test_combinations_are_each_alone_each_pair_and_all() -> None:
    found = combinations()
    assert found[0] == ()
    assert found[-1] == TECHNIQUES
    assert len(found) == len(set(found)) == 1 + 9 + 36 + 4 + 1
    assert set(PAPER) <= set(map(" + ".join, found))
    assert all("LoRA" in c for c in combinations(["LoRA"]))


SMALL = PairSize(layers=2, width=64, heads=2, length=32, vocabulary=64, rank=2, quantised=("int8_tensor",))


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 256)


def measured(folder: Path, *wanted: tuple[str, ...]) -> dict[str, PairRow]:
    rows = {row.techniques: row for row in measured_pairs(folder, wanted, updates=1, size=SMALL)}
    for row in rows.values():
        assert abs(row.predicted_peak_bytes - row.peak_bytes) <= max(CLOSE_BYTES, row.predicted_peak_bytes // 50)
        assert row.time_s > 0
    return rows


@pytest.mark.usefixtures("_small")
def test_codes_are_chosen_beside_freezing(tmp_path: Path) -> None:
    pair = measured(tmp_path, ("freeze", "quantise"))["freeze + quantise"]
    assert pair.kept
    assert 0 < pair.error <= 0.01


@pytest.mark.long
@pytest.mark.usefixtures("_small")
def test_a_pair_takes_less_than_each_alone_and_all_take_least(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    rows = measured(tmp_path, (), ("freeze",), ("quantise",), ("freeze", "quantise"), TECHNIQUES)
    peaks = {name: row.predicted_peak_bytes for name, row in rows.items()}
    alone = peaks["freeze"], peaks["quantise"]
    assert peaks["freeze + quantise"] < min(alone)
    assert max(alone) < peaks[""]
    assert peaks[" + ".join(TECHNIQUES)] == min(peaks.values())


@pytest.mark.usefixtures("_small")
def test_columns_say_what_a_plan_does(tmp_path: Path) -> None:
    row = measured(tmp_path, ("CPU updates",))["CPU updates"]
    assert row.offloaded_bytes >= row.updated_bytes > 0
    assert row.recomputed_bytes == row.coded == 0


def test_two_ranks_that_freeze(tmp_path: Path) -> None:
    """Each rank has its own samples, and shards; what trains is chosen on the first."""
    rows = measured(tmp_path, (), ("freeze",), ("freeze", "shard"))
    assert rows["freeze + shard"].peak_bytes <= rows["freeze + shard"].predicted_peak_bytes
    assert rows["freeze + shard"].predicted_peak_bytes < rows["freeze"].predicted_peak_bytes
    assert not rows["freeze + shard"].kept
