"""A rewrite is known by what it returns, not by how many calls that has; names of variants are made in one place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import LONG_LIVED, NO_LONG_LIVED, PLAIN, VariantName
from stowage.stages.rewrite import REWRITES, Rewrite, load_variant, variants_of
from stowage.stages.trace import trace_step


def traced() -> TraceTables:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    return trace_step(model, torch.ones(2, 4), loss=lambda outputs, batch: outputs.sum())


def swapped(trace: TraceTables) -> TraceTables:
    """One call for another that makes the same bits: as many calls as before."""
    calls = [replace(c, location="elsewhere") if c.target == "aten.tanh.default" else c for c in trace.calls]
    return replace(trace, calls=calls)


def test_a_rewrite_with_as_many_calls_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced()
    monkeypatch.setitem(REWRITES, "swapped", Rewrite("swapped", lambda trace, where: swapped(trace), lambda trace: []))
    found = variants_of(trace)
    assert list(found) == [PLAIN, "swapped"]
    assert found[PLAIN] is trace
    assert len(found["swapped"].calls) == len(trace.calls)
    assert [c.location for c in found["swapped"].calls] != [c.location for c in trace.calls]


def test_one_that_does_not_apply_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWRITES, "idle", Rewrite("idle", lambda trace, where: trace, lambda trace: []))
    assert list(variants_of(traced())) == [PLAIN]


@pytest.mark.parametrize("rewrite", [PLAIN, "packed"])
@pytest.mark.parametrize("chain", [NO_LONG_LIVED, LONG_LIVED])
def test_names_come_back(rewrite: str, chain: str) -> None:
    name = VariantName(rewrite, LONG_LIVED if chain else NO_LONG_LIVED)
    assert VariantName.of(name.text) == name
    assert name.text == (f"{rewrite}+long_lived" if chain else rewrite)


def test_an_unknown_one_is_one_sentence(tmp_path: Path) -> None:
    traced().save(tmp_path)
    assert load_variant(tmp_path, "plain+long_lived").calls == traced().calls
    with pytest.raises(TableError, match=r"There is no rewrite 'x' of a trace: run the solve stage"):
        load_variant(tmp_path, "x+y")
