"""What forward saves with freezing and codes together: predicted and measured to the byte, no more than with either."""

from __future__ import annotations

import pytest

from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.saved_in_codes import BOTH, CODES, FREEZING, NEITHER, saved_in_codes
from stowage.stages.rewrite.lossy import saved as saved_module
from tests.freezing.test_saved_activations import SMALLER
from tests.matrix import some

KINDS = ("fixed8_unit", "int8", "int4_group", "top10")
LIMITS = (0.05, 0.4)


@pytest.mark.parametrize("name", some(MODELS, keep=["bert", "decoder"]))
def test_predicted_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model = MODELS[name]
    rows = list(saved_in_codes(model, 0.9, KINDS, LIMITS, batches=2, **SMALLER[name]))
    ways = [(NEITHER, 0.0), *((CODES, at) for at in LIMITS), (FREEZING, 0.0), *((BOTH, at) for at in LIMITS)]
    masks = {NEITHER: ["all"], CODES: ["all"], FREEZING: ["worst", "last", "ILS"], BOTH: ["worst", "last", "ILS"]}
    assert [(row.techniques, row.limit, row.mask) for row in rows] == [(*way, m) for way in ways for m in masks[way[0]]]
    assert [row.measured_bytes for row in rows] == [row.predicted_bytes for row in rows]
    saved = {(row.techniques, row.limit, row.mask): row.measured_bytes for row in rows}
    of_all = saved[NEITHER, 0.0, "all"]
    for limit in LIMITS:
        assert saved[CODES, limit, "all"] < of_all
        assert saved[BOTH, limit, "worst"] < saved[FREEZING, 0.0, "worst"] < of_all
        for mask in ("worst", "last", "ILS"):
            assert saved[BOTH, limit, "last"] <= saved[BOTH, limit, mask] <= saved[BOTH, limit, "worst"]
        assert saved[BOTH, limit, "last"] < min(saved[CODES, limit, "all"], saved[FREEZING, 0.0, "last"])
    for row in rows:
        coded = row.techniques in (CODES, BOTH)
        assert bool(row.kept) == coded
        assert (0 < row.error <= row.limit) == coded
        assert row.rate == (0.9 if row.techniques in (FREEZING, BOTH) else 0.0)
        paper = {NEITHER: model.paper_gb[0], BOTH: model.paper_gb[1]}.get(row.techniques, 0.0)
        assert row.paper_gb == paper
