"""O-ILP asked again: where the time is over before it has an answer, its relaxation has one."""

from __future__ import annotations

from typing import Any

import pytest

from stowage.stages.formulations.o_ilp import OIlpAnswer, o_ilp
from stowage.stages.solve import search
from stowage.stages.solve.chain import Chain
from stowage.stages.solve.offload import Offloader
from stowage.stages.solve.select import program_of
from stowage.stages.solver.outcome import SolverSettings
from tests.offload.away import BELOW, smallest_below
from tests.runtime.beside_eager import adamw, prepare
from tests.zoo import ZOO


def test_no_answer_in_time_is_asked_of_the_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(ZOO["gpt2"], adamw)
    program = program_of(prepared.trace, prepared.nodes)
    offloader = Offloader(program, Chain(prepared.blocks, prepared.nodes, prepared.options), BELOW)
    budget_bytes = int(smallest_below(prepared) * 4)
    asked: list[str] = []

    def too_slow(*arguments: Any, method: str = "exact", **more: Any) -> OIlpAnswer:
        asked.append(method)
        if method == "exact":
            return OIlpAnswer("unknown", None, 0.0, None, "none", 0.0)
        return o_ilp(*arguments, method="relax_and_round", **more)

    monkeypatch.setattr(search, "o_ilp", too_slow)
    plans = list(search.plans(offloader, budget_bytes, SolverSettings(time_limit_s=10.0, gap=0.01)))
    assert asked[:2] == ["exact", "relax_and_round"]
    fitting = [p for p in plans if p.outcome.peak_bytes <= budget_bytes]
    assert fitting
    assert all(p.outcome.time_s >= p.fractional_s * 0.99 > 0 for p in fitting)
