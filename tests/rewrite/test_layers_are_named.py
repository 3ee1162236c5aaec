"""What is kept in fewer bits is said layer by layer: in the summary, the report, and the head of step.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.stages.codegen.header import _lossy
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.report.facts import _in_fewer_bits
from stowage.stages.rewrite.lossy import Classes, described, effects
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.trace import trace_step
from tests.zoo import ZOO

CLASS = "transformer.h.*.mlp.c_fc addmm"


def traced(name: str, monkeypatch: pytest.MonkeyPatch) -> TraceTables:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO[name]()
    return trace_step(model, batch, loss=loss)


@pytest.mark.parametrize(("layers", "text"), [((0, 1, 2), "0-2"), ((0, 2), "0,2"), ((1,), "1")])
def test_some_layers_of_a_class(layers: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("gpt2", monkeypatch)
    members = Classes(trace).members(["int8"])["int8", CLASS]
    assert len(members) == 3
    variant = VariantName.at({"int8": [members[layer][0] for layer in layers]}).text
    kept, _ = described(trace, variant, [])
    assert kept == (f"int8: transformer.h.[{text}].mlp.c_fc addmm",)


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet", "lstm"])
def test_each_tensor_by_itself_is_the_one_that_is_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of one site has the numbers of the module that makes the value."""
    trace = traced(name, monkeypatch)
    for (kind, _), members in Classes(trace).members(["int8"]).items():
        for site, saved in members:
            (text,), _ = described(trace, VariantName.at({kind: [site]}).text, [])
            module = trace.calls[saved.maker].module
            assert "*" not in text
            assert "[" not in module
            assert text.replace("[", "").replace("]", "").startswith(f"int8: {module or trace.meta.model} ")


def test_summary_report_and_step_say_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("gpt2", monkeypatch)
    members = Classes(trace).members(["int8"])["int8", CLASS]
    variant = VariantName.at({"int8": [members[0][0], members[2][0]]}).text
    lossy, _ = described(trace, variant, [])
    words = effects(trace, variant, [])
    empty = {name: "" if kind == "str" else 0 for name, kind in PlanSummary.__annotations__.items()}
    known = {n: () for n, kind in PlanSummary.__annotations__.items() if kind.startswith("tuple")}
    summary = replace(PlanSummary(**empty | known), lossy=lossy, lossy_effects=words, exact=False)  # type: ignore[arg-type]
    said = "transformer.h.[0,2].mlp.c_fc addmm"
    assert said in repr(summary)
    assert f"- int8: {said} ({words[0]})" in _lossy(summary)
    (line,) = _in_fewer_bits(summary)
    assert said in str(line)
    assert words[0] in str(line)
