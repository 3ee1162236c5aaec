"""Steps with a card's attention: they are traced, planned, written and judged here, where no kernel of it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.flows.planning.step import QUICK, Planning, plan_costed
from stowage.stages.device import device_of
from stowage.stages.ir.errors import Infeasible
from stowage.stages.ir.operators import SEALS, without_overload
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.profile import arguments
from stowage.stages.profile.sequence import WindowRun, last_touched
from stowage.stages.profile.windows import Window
from stowage.stages.runtime.whitelist import checked
from stowage.stages.simulate.stored import check_stored
from stowage.stages.solve import lower_tier_of
from tests.cards.attention import CARD, KINDS, estimated, gpt2_on_a_card

BACKWARD = "attention_backward"


def readers(trace: TraceTables) -> list[tuple[Call, Call]]:
    """Each fused backward, and the forward whose seeds it reads."""
    found = []
    for call in trace.calls:
        if BACKWARD in call.target:
            makers = {trace.values[v].call for v in call.reads if trace.values[v].call >= 0}
            found += [(call, trace.calls[m]) for m in makers if without_overload(trace.calls[m].target) in SEALS]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_fused_operators(kind: str) -> None:
    trace = gpt2_on_a_card(kind)
    pairs = readers(trace)
    assert len(pairs) == 3
    for backward, forward in pairs:
        assert kind in forward.target
        assert forward.is_random, "dropout is inside"
        made = {v for v in forward.returns if v >= 0}
        assert len(made.intersection(backward.reads)) >= 4, "output, sums, and what seeds the masks"


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_are_what_the_forward_has_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are made up in the device's memory are read as the host's, which ends the process."""
    trace = gpt2_on_a_card(kind)
    backward, forward = readers(trace)[0]
    ran: list[str] = []
    made = [torch.full((2,), float(i)) for i in range(len(forward.returns))]

    def operator_of(target: str) -> Any:
        ran.append(target)
        return lambda *args, **kwargs: made

    monkeypatch.setattr(arguments, "operator_of", operator_of)
    args, kwargs = arguments.make_arguments(backward, trace, torch.device("cpu"))
    assert ran == [forward.target]
    given = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)]
    sealed = [v for v in backward.reads if v in forward.returns]
    for value in sealed:
        assert given[backward.reads.index(value)] is made[forward.returns.index(value)]
    assert len(sealed) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_windows_begin_with_what_the_forward_has_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = gpt2_on_a_card(kind)
    backward, forward = readers(trace)[0]
    made = [torch.zeros(3) for _ in forward.returns]
    monkeypatch.setattr(arguments, "operator_of", lambda target: lambda *args, **kwargs: made)
    run = WindowRun(Window((backward,), 0), trace, last_touched(trace), device_of("cpu"), "cpu")
    for value in backward.reads:
        if value in forward.returns:
            assert run._given[value] is made[forward.returns.index(value)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("part", "offloads"), [(10.0, False), (0.55, False), (0.35, True)], ids=["all", "half", "offloaded"]
)
def test_a_card_is_planned_for(kind: str, part: float, offloads: bool, tmp_path: Path) -> None:
    trace = gpt2_on_a_card(kind, max_grad_norm=1.0 if kind == "flash" else None)
    costed = estimated(trace, tmp_path)
    lower_tier = lower_tier_of(CARD, host_budget="1GiB", disk_budget=None, offload_dir=None) if offloads else None
    if lower_tier is not None:
        lower_tier = replace(lower_tier, smallest_bytes=4096)
    budget = int(part * costed.eager_peak_bytes)
    how = Planning(stores=tmp_path, effort=QUICK, lower_tier=lower_tier)
    try:
        planned = plan_costed(costed, budget, how)
    except Infeasible as error:
        budget = error.smallest_feasible_bytes
        planned = plan_costed(costed, budget, how)
    check_stored(planned.trace, planned.nodes, planned.rows, planned.slots, planned.summary)
    checked(planned.source, "step.py", {c.target for c in planned.trace.calls})
    assert planned.summary.device_peak_bytes <= budget
    assert f"_scaled_dot_product_{kind}_attention_backward" in planned.source
    assert bool(planned.slots) == offloads
    if part > 1:
        assert planned.source.count("run.update_together(") == 1, "everything in one call of the optimizer"
        assert "run.update(" not in planned.source
    elif planned.source.count(f"_scaled_dot_product_{kind}_attention.") > 3:
        assert "run.random.replay(" in planned.source, "masks are drawn again from the first state"
