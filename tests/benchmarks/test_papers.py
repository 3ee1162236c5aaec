"""The preprint's tables on models small enough for a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stowage.flows.benchmarks.papers import tables as _papers
from stowage.flows.benchmarks.papers.machines import MACHINES, OTHERS, TABLE_2, PaperModel
from stowage.flows.benchmarks.papers.tables import PREPRINT, PaperRow, cases, markdown_of, plan_case
from stowage.flows.planning.step import QUICK

MIB = 1 << 20
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 999,
}


def planned(model: PaperModel, budget: int, stores: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, PaperRow]:
    machine = MACHINES[model.machine]
    small = replace(machine, budget_bytes=budget)
    monkeypatch.setattr(_papers, "MACHINES", {model.machine: small})
    monkeypatch.setattr(_papers, "EFFORT", QUICK)
    return {
        case: plan_case(model, case, method, lower_tier, stores)
        for case, (method, lower_tier) in cases(machine.lower_tier, ablations=False).items()
    }


@pytest.mark.long
def test_ours_is_never_above_the_preprints_formulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PaperModel("RTX 3060", "small", "llama", SHAPE, batch=1, published={"all": 0.1})
    rows = planned(model, 20 * MIB, tmp_path, monkeypatch)
    assert set(rows) == {"all", PREPRINT}
    assert all(r.peak_bytes <= r.budget_bytes for r in rows.values())
    assert all(0 < r.host_bytes <= MACHINES["RTX 3060"].lower_tier.capacity_bytes for r in rows.values())
    assert rows["all"].overhead <= rows[PREPRINT].overhead + 1e-9
    table = markdown_of(list(rows.values())).splitlines()
    assert len(table) == 2 + 2
    assert "+10.0%" in table[2]


@pytest.mark.long
def test_lora_is_planned_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planned(PaperModel("RTX 3060", "small", "llama", SHAPE, batch=1, lora=True), 18 * MIB, tmp_path, monkeypatch)
    assert rows["all"].overhead < 0.5
    assert rows["all"].peak_bytes <= 18 * MIB


def test_what_is_published_is_stated() -> None:
    """Table 2 and, from samples per second, Table 1 of the preprint."""
    assert [m.published["all"] for m in TABLE_2] == [0.137, 0.243]
    assert [m.batch for m in TABLE_2] == [4, 8]
    stated = {m.name: round(m.published["all"], 3) for m in OTHERS if m.published}
    assert stated == {"Bloom-3B bf16": 0.399, "Mistral-7B bf16": 0.208, "Llama3-8B bf16": 0.212}
