"""What forward saves for backward at each freezing rate, predicted and measured to the byte."""

from __future__ import annotations

import pytest

from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.saved import saved_activations
from stowage.flows.benchmarks.slimfit.saved_by_ils import saved_by_ils
from stowage.flows.benchmarks.slimfit.static import SEMI_STATIC, static_activations
from tests.matrix import some

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SMALLER = {
    "bert": {**SMALL, "max_position_embeddings": 32, "vocab_size": 96},
    "vit": {**SMALL, "image_size": 32, "patch_size": 8},
    "vit384": {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10},
    "decoder": {**SMALL, "max_position_embeddings": 32, "vocab_size": 96},
}


@pytest.mark.parametrize("name", some(MODELS, keep=["bert", "decoder"]))
def test_predicted_is_measured(name: str) -> None:
    found = list(saved_activations(MODELS[name], (0.0, 0.5, 0.9, 1.0), **SMALLER[name]))
    assert [row.measured_bytes for row in found] == [row.predicted_bytes for row in found]
    worst = [row.measured_bytes for row in found if row.mask == "worst"]
    last = [row.measured_bytes for row in found if row.mask == "last"]
    assert worst == sorted(worst, reverse=True)
    assert all(a >= b for a, b in zip(worst, last, strict=True))
    assert last[-1] < 0.01 * last[0], "with everything frozen nothing is saved but the loss"
    assert last[2] < 0.3 * last[0], "the last units need little"
    assert worst[2] > 0.5 * worst[0], "if the first unit trains, what has no weights is saved through the whole model"


def test_what_is_saved_by_reader_is_all_and_inputs_of_weights_alone_are_spared() -> None:
    rates = (0.0, 0.5, 0.9)
    saved = [r for r in saved_activations(MODELS["bert"], rates, **SMALLER["bert"]) if r.mask == "worst"]
    found = list(static_activations(MODELS["bert"], rates, **SMALLER["bert"]))
    static = [s for s in found if s.reader != SEMI_STATIC]
    for row in saved:
        loss_bytes = 4  # it stays, and nothing reads it
        assert sum(s.nbytes for s in static if s.rate == row.rate) + loss_bytes == row.predicted_bytes
    by_reader = {r: [s.nbytes for s in static if s.reader == r] for r in {s.reader for s in static}}
    assert by_reader["matrix products with weights"][-1] < by_reader["matrix products with weights"][0]
    for reader in ("normalisations", "activation functions", "attention"):
        assert by_reader[reader][0] > 0
        assert len(set(by_reader[reader])) == 1, f"{reader} has static activations"
    semi = [s.nbytes for s in found if s.reader == SEMI_STATIC]
    everything = by_reader["normalisations"][0]
    assert semi[0] > everything, "those that train keep everything, and codes beside it"
    assert semi[2] < 0.5 * everything, "frozen ones keep a tenth of the values, in a fifth of the bytes"


def test_what_ils_chooses_saves_what_was_predicted_and_no_more_than_the_worst() -> None:
    for row in saved_by_ils(MODELS["bert"], (0.5, 0.9), iterations=6, **SMALLER["bert"]):
        assert row.off == 0
        assert (
            row.measured_mean_bytes == row.predicted_mean_bytes <= row.predicted_most_bytes == row.measured_most_bytes
        )
        assert row.measured_most_bytes <= row.worst_bytes
        assert row.last_bytes < row.worst_bytes
