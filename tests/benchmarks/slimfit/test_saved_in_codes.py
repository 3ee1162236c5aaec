"""What forward saves with freezing and codes together: predicted and measured to the byte, no more than with either."""

from __future__ import annotations

import pytest

from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.saved_in_codes import BOTH, CODES, FREEZING, NEITHER, saved_in_codes
from stowage.stages.ir.lossy import Lossy
from stowage.stages.rewrite.lossy import saved as saved_module
from tests.freezing.test_saved_activations import SMALLER
from tests.matrix import some

LEAVE = Lossy(["fixed8_unit", "int8", "int4_group", "top10"], 0.05)


@pytest.mark.parametrize("name", some(MODELS, keep=["bert", "decoder"]))
def test_predicted_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model = MODELS[name]
    rows = list(saved_in_codes(model, 0.9, LEAVE, batches=2, **SMALLER[name]))
    assert [row.techniques for row in rows] == [t for t in (NEITHER, CODES, FREEZING, BOTH) for _ in range(2)]
    assert [row.measured_bytes for row in rows] == [row.predicted_bytes for row in rows]
    worst, last = ({row.techniques: row.measured_bytes for row in rows if row.mask == m} for m in ("worst", "last"))
    assert worst[BOTH] < worst[FREEZING] < worst[NEITHER]
    assert worst[BOTH] <= worst[CODES] < worst[NEITHER], "what everything is made of again may be static all the same"
    assert last[BOTH] < min(last[CODES], last[FREEZING])
    for row in rows:
        coded = row.techniques in (CODES, BOTH)
        assert bool(row.kept) == coded
        assert (0 < row.error <= 0.05) == coded
        assert row.rate == (0.9 if row.techniques in (FREEZING, BOTH) else 0.0)
        paper = {NEITHER: model.paper_gb[0], BOTH: model.paper_gb[1]}.get(row.techniques, 0.0)
        assert row.paper_gb == paper
