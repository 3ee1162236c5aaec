"""Parameters are grouped by what saves memory when it is frozen together, as in SlimFit's code, or by blocks."""

from __future__ import annotations

import pytest

from stowage.stages.freezing.units import units_of
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.units import ALWAYS, Unit, bit, implies, joined, mask_of, names_in, spans
from stowage.stages.runtime.active import ActiveUnits
from tests.matrix import some
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO

BERT = "bert.encoder.layer.0."


def units(name: str, kind: str) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.parameters for unit in units_of(prepared_zoo(name).trace, kind)}  # type: ignore[arg-type]


def test_q_k_and_v_share_what_they_read_and_biases_go_with_weights() -> None:
    found = units("bert", "saving")
    own = [f"{BERT}attention.self.{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")]
    assert sorted(found[f"{BERT}attention.self"]) == sorted(own)
    assert found[f"{BERT}output.dense"] == (f"{BERT}output.dense.weight", f"{BERT}output.dense.bias")
    assert found[f"{BERT}output.LayerNorm"] == (f"{BERT}output.LayerNorm.weight", f"{BERT}output.LayerNorm.bias")
    words = "bert.embeddings.word_embeddings.weight"
    assert found[words] == (words,), "three embeddings share a gradient, and save nothing together"


def test_units_of_the_paper() -> None:
    found = units("bert", "parameter")
    assert f"{BERT}attention.self.query.weight" in found
    assert f"{BERT}output.LayerNorm.weight" in found
    assert not [name for name in found if name.endswith("bias")], "biases always train"


def test_blocks() -> None:
    found = units("gpt2", "block")
    assert set(found) == {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f"} | {
        f"transformer.h.{i}" for i in range(3)
    }
    assert len(found["transformer.h.1"]) == 12


@pytest.mark.parametrize("kind", ["saving", "block"])
@pytest.mark.parametrize("name", some(ZOO, keep=["gpt2", "vit", "resnet", "tied", "lstm", "llama", "gpt2_frozen"]))
def test_every_parameter_that_trains_is_in_one_unit(name: str, kind: str) -> None:
    trace = prepared_zoo(name).trace
    members = [p for names in units(name, kind).values() for p in names]
    assert sorted(members) == sorted(g.parameter for g in trace.gradients if g.gradient_value >= 0)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"freeze\.units is 'layer': write one of saving, parameter, block"):
        units("gpt2", "layer")


SIX = [Unit(f"u{i}", (f"p{i}",)) for i in range(6)]


def test_sets_of_units() -> None:
    mask = mask_of(SIX, ["u1", "u4"])
    assert mask == ALWAYS | bit(1) | bit(4)
    assert names_in(SIX, mask) == ["u1", "u4"]
    assert joined(bit(1), bit(2)) == bit(1) | bit(2)
    assert joined(bit(1), ALWAYS) == ALWAYS
    assert implies(bit(1), bit(1) | bit(2))
    assert not implies(bit(1) | bit(2), bit(1))
    assert implies(bit(1), ALWAYS)
    assert not implies(ALWAYS, bit(1))


@pytest.mark.parametrize("guard", [bit(0), bit(0) | bit(1), 2 * 0b111, 2 * 0b101111, 2 * 0b111111, 2 * 0b110111])
def test_generated_code_asks_for_what_is_meant(guard: int) -> None:
    asked = [name if name else ... for name in spans(SIX, guard)]
    active = ActiveUnits([unit.name for unit in SIX])
    for unit in SIX:
        active.choose([unit.name])
        assert active(*asked) == (unit.name in names_in(SIX, guard))
    active.choose([])
    assert not active(*asked)


def test_an_unknown_unit_cannot_be_chosen() -> None:
    with pytest.raises(ParameterError, match="There is no unit 'x' to train"):
        ActiveUnits(["a"]).choose(["x"])
