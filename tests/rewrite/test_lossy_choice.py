"""Which classes of tensors are packed in which kinds: the best within the limit; errors add up as they are measured."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from stowage.stages.ir.lossy import KINDS, GradientError, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import is_asked, is_exact, rewritten
from stowage.stages.rewrite.lossy import Classes, choices, described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.rewrite.lossy.choose import STEPS, Candidate, chosen
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors, run_trace
from stowage.stages.sensitivity.interpreter import StoredForward
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.synthetic_steps import costs_for
from tests.zoo import ZOO


def traced(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TraceTables, StepTensors]:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO[name]()
    return trace_step(model, batch, loss=loss), StepTensors.of(model, batch)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    found = [
        Candidate(
            kind, f"class {c}", (c,), draw.randrange(0, 40) / 100, draw.randrange(1, 50), draw.random(), frozenset([c])
        )
        for c in range(4)
        for kind in ("a", "b", "c")
    ]
    limit, price = 0.6, draw.choice([0.01, 0.05, math.inf])

    def worth(taken: tuple[Candidate | None, ...]) -> tuple[float, float]:
        some = [c for c in taken if c is not None]
        if math.isinf(price):
            return sum(c.bytes for c in some), -sum(c.seconds for c in some)
        return sum(price * c.bytes - c.seconds for c in some), 0.0

    classes = [[None, *(c for c in found if c.tensors == f"class {k}")] for k in range(4)]
    allowed = [
        taken
        for taken in itertools.product(*classes)
        if sum(math.ceil(STEPS * c.squared_error / limit) for c in taken if c is not None) <= STEPS
    ]
    assert worth(tuple(chosen(found, price, limit))) == pytest.approx(max(map(worth, allowed)))


def test_of_what_spares_the_same_one_is_taken() -> None:
    one = Candidate("int8", "x", (0,), 0.0, 10, 0.0, frozenset([1, 2]))
    two = Candidate("gelu2bit", "x alone", (0,), 0.0, 8, 0.0, frozenset([1]))
    assert chosen([one, two], math.inf, 1.0) == [one]


@pytest.mark.parametrize(
    "name",
    some(["gpt2", "bert", "llama", "t5", "vit", "resnet", "unet", "lstm"], keep=["gpt2", "vit", "resnet", "lstm"]),
)
def test_errors_of_classes_add_up_as_variances(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, live = traced(name, monkeypatch)
    kinds = ("bf16", "int8_tensor", "int4_tensor")
    errors = gradient_errors(trace, kinds, [live])
    costs = {c.signature: c for c in costs_for(trace).values()} | {
        c.signature: c for made in Classes(trace).everywhere(kinds) for c in costs_for(made).values()
    }
    for limit in (0.003, 0.01, 0.05):
        names = choices(trace, costs, errors, Lossy(kinds, limit))
        assert names
        for variant in names:
            assert is_asked(variant)
            assert not is_exact(variant)
            kept, predicted = described(trace, variant, errors)
            assert kept
            assert predicted <= limit
            measured = gradient_error(trace, rewritten(trace, variant), [live])
            assert 0 < measured <= predicted


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_forward_that_is_kept_gives_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where forward changes in place what backward reads, and however many backwards follow."""
    trace, live = traced(name, monkeypatch)
    kinds = ("bf16", "int4_tensor")
    made = [trace, *Classes(trace).everywhere(kinds)]
    with forked_generators():
        state = torch.get_rng_state()
        forward = StoredForward(trace, live, made[1:])
        kept = [forward.gradients(each) for each in (*made, *made)]
        for number, each in enumerate(made):
            torch.set_rng_state(state)
            _, expected = run_trace(each, live)
            for found in (kept[number], kept[number + len(made)]):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[n], g) for n, g in expected.items())


def test_the_loss_and_the_model_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, live = traced("resnet", monkeypatch)
    before = {n: t.clone() for n, t in {**live.parameters, **live.buffers}.items()}
    state = torch.get_rng_state()
    errors = gradient_errors(trace, KINDS, [live])
    assert {e.kind for e in errors} >= {"bf16", "int8_tensor"}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[n], t) for n, t in {**live.parameters, **live.buffers}.items())


def test_the_same_tensor_of_every_layer_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = traced("gpt2", monkeypatch)
    members = Classes(trace).members(["int8_tensor"])
    assert len(members["int8_tensor", "transformer.h.*.mlp.c_fc addmm"]) == 3
    names = [name for _, name in members]
    assert len(set(names)) == len(names)


def test_what_was_not_measured_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = traced("gpt2", monkeypatch)
    costs = {c.signature: c for made in Classes(trace).everywhere(["bf16"]) for c in costs_for(made).values()}
    assert choices(trace, costs, [], Lossy("bf16")) == []
    rows = [GradientError("bf16", name, 1.0) for _, name in Classes(trace).members(["bf16"])]
    assert choices(trace, costs, rows, Lossy("bf16")) == []
