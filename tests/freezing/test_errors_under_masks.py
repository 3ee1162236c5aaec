"""What codes may do to the gradient holds for every choice of what trains, beside the gradient of that alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.freezing.errors import Norms, errors_under_masks, largest_ratio
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.lossy import MEASURED_BATCHES, GradientError, Lossy
from stowage.stages.ir.units import Unit
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import Classes, choices, described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors, run_trace
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.sensitivity.test_batches_not_seen import another
from tests.solve.synthetic_steps import costs_for
from tests.zoo import ZOO

KINDS = ("bf16", "int8_tensor", "int4_group")
LIMIT = 0.02
MASKS = 400
"""Most masks that are looked at."""

UNSEEN = 2
"""Batches that nothing was measured on."""

squares = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))


def ratio_of(parts: Iterable[Norms]) -> float:
    """Return the ratio of the sums."""
    change, norm = (sum(values) for values in zip((0.0, 0.0), *parts, strict=True))
    return change / norm if norm else inf if change else 0.0


@given(st.tuples(squares, squares), st.lists(st.tuples(squares, squares), min_size=1, max_size=7), st.integers(1, 7))
def test_no_mask_has_a_larger_ratio(always: Norms, units: Sequence[Norms], least: int) -> None:
    sizes = range(min(least, len(units)), len(units) + 1)
    expected = max(ratio_of([always, *taken]) for many in sizes for taken in combinations(units, many))
    assert largest_ratio(always, units, least) == pytest.approx(expected, rel=1e-9)


def test_few_units_change_by_more_than_all() -> None:
    """Half of the change is in a unit with a hundredth of the gradient."""
    error = GradientError("int8", "x", 0.02, 0.0, 0.0, ("a", "b", "c"), (0.01, 0.01, 0.0), (0.01, 0.98, 0.01))
    units = [Unit("first", ("a",)), Unit("second", ("b",)), Unit("third", ("c",))]

    def largest(least: int, units: Sequence[Unit]) -> float:
        (found,) = errors_under_masks([error], units, least)
        return found.squared_error

    assert largest(1, units) == pytest.approx(0.01 / 0.01)
    assert largest(2, units) == pytest.approx(0.01 / 0.02)
    assert largest(3, units) == pytest.approx(0.02)
    assert largest(1, units[1:]) == pytest.approx(0.01 / 0.02), "what is in no unit trains in every step"
    assert largest(0, units) == largest(1, units)


def seeded_error(seed: int, *given: Any, **more: Any) -> float:
    """Return the error of a gradient with the draws of dropout that follow from a seed."""
    with forked_generators():
        torch.manual_seed(seed)
        return gradient_error(*given, **more)


def test_an_error_among_some_parameters_is_the_largest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO["gpt2"]()
    model.eval()  # no dropout
    trace, live = trace_step(model, batch, loss=loss), StepTensors.of(model, batch)
    packed = rewritten(trace, "int8")
    exact, coded = (run_trace(each, live)[1] for each in (trace, packed))
    sets = [list(exact)[:4], list(exact)[4:9], list(exact)]

    def norm(tensors: Iterable[torch.Tensor]) -> float:
        return sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))

    expected = [norm(coded[n] - exact[n] for n in names) / norm(exact[n] for n in names) for names in sets]
    for names, error in zip(sets, expected, strict=True):
        assert gradient_error(trace, packed, [live], among=[names]) == pytest.approx(error)
    assert gradient_error(trace, packed, [live], among=sets) == pytest.approx(max(expected))
    assert gradient_error(trace, packed, [live]) == pytest.approx(expected[2])


@pytest.mark.parametrize("active", [2, 5])
@pytest.mark.parametrize("name", some(["gpt2", "bert", "vit", "unet", "t5"], keep=["bert"]))
def test_whatever_trains_is_within_what_is_predicted(name: str, active: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On batches that nothing was measured on, beside the root mean square of what was, as everything's errors are."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    torch.manual_seed(3)
    model, batch, loss = ZOO[name]()
    trace = trace_step(model, batch, loss=loss)
    units = units_of(trace, "saving")
    seen = [StepTensors.of(model, another(batch, seed)) for seed in range(MEASURED_BATCHES)]
    errors = errors_under_masks(whole := gradient_errors(trace, KINDS, seen), units, active)
    costs = {c.signature: c for each in (trace, *Classes(trace).everywhere(KINDS)) for c in costs_for(each).values()}
    found, others = (choices(trace, costs, own, Lossy(KINDS, LIMIT), 0.0) for own in (errors, whole))
    assert found
    assert all(described(trace, variant, errors)[1] <= LIMIT for variant in found)
    draws = random.Random(0)
    taken = list(combinations(units, active))
    taken = draws.sample(taken, min(MASKS, len(taken)))
    masks = [[name for unit in mask for name in unit.parameters] for mask in taken]
    above_of_all = 0
    for variant in dict.fromkeys([*found, *others]):
        predicted, of_all = (described(trace, variant, own)[1] for own in (errors, whole))
        assert of_all <= predicted
        packed = rewritten(trace, variant)
        for seed in range(UNSEEN):
            unseen = [StepTensors.of(model, another(batch, 100 + seed))]
            measured = seeded_error(seed, trace, packed, unseen, seen, among=masks)
            assert measured <= predicted, f"{variant} on batch {seed}"
            above_of_all += measured > of_all
    if name == "bert" and active == 2:
        assert above_of_all, "what is predicted of the whole gradient does not hold for a part of it"
