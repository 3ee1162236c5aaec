"""A forward-only plan gives what the model gives in evaluation mode, bit for bit, within the budget."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.evaluation import Resting, plan_forward
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.planning.step import QUICK
from stowage.stages.device import measure_allocations, unique_bytes
from stowage.stages.device.tiers import NullTier
from stowage.stages.ir.errors import Infeasible, OffloadedError, TraceError
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.observe.measure import resident_tensors
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.trace.forward import record_forward
from stowage.stages.workload.calls import call_model
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.matrix import some
from tests.offload.with_lower_tier import LOWER_TIER
from tests.runtime.beside_eager import differences, same
from tests.zoo import ZOO

SIZES = {"n_layer": 2, "n_embd": 320, "n_head": 4, "n_positions": 32, "vocab_size": 256}


def gpt2() -> nn.Module:
    """State outweighs what the disk tier needs for itself; returns its cache of keys and values."""
    model = build_model("gpt2", SIZES, seed=0)
    model.config.use_cache = True
    return model


BATCHES = [sample_batch(gpt2(), rows, 24, rows) for rows in (2, 2, 3)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(model: nn.Module, batch: Any) -> Any:
    """In evaluation mode, which is undone."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    with torch.no_grad():
        found = model(**batch)
    for module, training in modes.items():
        module.training = training
    return found


def parts(outputs: Any) -> Any:
    """Nested tensors, caches of keys and values included."""
    if hasattr(outputs, "layers"):
        return [(layer.keys, layer.values) for layer in outputs.layers]
    if isinstance(outputs, dict):
        return {key: parts(value) for key, value in outputs.items()}
    return outputs


def assert_same_outputs(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert same(parts(found), parts(expected))


@pytest.fixture(scope="module")
def from_disk(fit_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[nn.Module], TrainingStep]:
    """Makes steps that train from disk, with so little memory that weights are offloaded between iterations."""
    common: dict[str, Any] = {
        "method": "offmate",
        "offload_dir": tmp_path_factory.mktemp("lower_tier"),
        "cache_dir": fit_stores,
        "quick": True,
        "say": lambda text: None,
    }
    return lambda model: fit(model, BATCHES[0], adamw, device_budget="27MiB", **common)


def train(step: TrainingStep, other: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    state = torch.get_rng_state()
    found = step(batch)
    torch.set_rng_state(state)
    expected = other(**batch).loss
    expected.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert same(found.detach(), expected.detach())


def places(step: TrainingStep) -> dict[str, str]:
    assert step.programs.offloading is not None
    step.programs.offloading.settle_all()
    return {s.name: step.programs.offloading.where(s.name) for s in step.planned.slots if s.role != "temporary"}


def test_between_iterations_from_disk(from_disk: Callable[[nn.Module], TrainingStep]) -> None:
    model, other = gpt2(), gpt2()
    step, optimizer = from_disk(model), adamw(other.parameters())
    for number in range(5):
        train(step, other, optimizer, BATCHES[0])
        before, modes, random = places(step), [m.training for m in model.modules()], torch.get_rng_state()
        for batch in (BATCHES[1], BATCHES[2]) if number == 2 else (BATCHES[1],):
            assert_same_outputs(step.evaluate(batch), plain(other, batch))
        assert places(step) == before
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random)
    assert step.evaluation is not None
    assert step.evaluation.summary.reload_bytes > 0
    assert sum(place == "offloaded" for place in before.values()) > 5
    with step.on_device():
        assert differences(model, other) == []
        assert step.optimizer is not None
        assert same(step.optimizer.state_dict(), optimizer.state_dict())


def test_measured_within_the_budget_as_predicted(from_disk: Callable[[nn.Module], TrainingStep]) -> None:
    step = from_disk(gpt2())
    step(BATCHES[0])
    step.evaluate(BATCHES[1])
    assert step.evaluation is not None
    program, plan = step._evaluations._known[0].program, step.evaluation.summary
    program.enter()
    tensors = [*resident_tensors(step.model, step.optimizer, BATCHES[1]), *program.resident()]
    resident = unique_bytes(tensors) + program.staging_bytes
    measured = measure_allocations(partial(program.forward, BATCHES[1]), tensors)
    assert resident + measured.peak_bytes <= plan.device_budget_bytes
    assert resident + measured.peak_bytes == pytest.approx(plan.device_peak_bytes, rel=0.001)
    assert plan.keep_all_peak_bytes > plan.device_budget_bytes, "else it could all be in memory at once"


def test_calling_the_model_while_weights_are_offloaded(from_disk: Callable[[nn.Module], TrainingStep]) -> None:
    step = from_disk(gpt2())
    step(BATCHES[0])
    for call in (step.model, step.model.get_submodule("transformer")):
        with pytest.raises(OffloadedError, match=r"step\.evaluate\(batch\)") as caught:
            call(**{k: v for k, v in BATCHES[0].items() if call is step.model or k != "labels"})
        assert "\n" not in str(caught.value)
    gpt2()(**BATCHES[0])  # other models are none of its business
    assert all(not m._forward_pre_hooks for m in step.model.modules())
    found = step.evaluate(BATCHES[1])
    with step.on_device() as model:
        for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert_same_outputs(found, plain(one, BATCHES[1]))


def test_state_dicts_while_tensors_are_offloaded(from_disk: Callable[[nn.Module], TrainingStep]) -> None:
    """They would hold NaN, or lose what is loaded: an error says so; copies and what is in memory are not concerned."""
    step = from_disk(gpt2())
    step(BATCHES[0])
    assert step.optimizer is not None
    for owner in (step.model, step.model.get_submodule("transformer"), step.optimizer):
        with pytest.raises(OffloadedError, match=r"is offloaded: write a file with") as caught:
            owner.state_dict()
        assert "\n" not in str(caught.value)
    with step.on_device() as model:
        weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(step.optimizer.state_dict())
        assert not any(t.isnan().any() for t in weights.values())
        again = pickle.loads(pickle.dumps(model))
        other = torch.optim.AdamW(again.parameters())
        other.load_state_dict(states)
    step(BATCHES[1])
    assert again.state_dict().keys() == weights.keys()
    with pytest.raises(OffloadedError, match=r"load_state_dict\(\) was called while .*step\.load_optimizer"):
        step.optimizer.load_state_dict(states)
    gpt2().state_dict()


@pytest.mark.parametrize(
    "name",
    some(["gpt2_mask", "t5", "transformer", "lstm", "batchnorm", "tied", "in_place"], keep=["batchnorm", "tied", "t5"]),
)
def test_from_nothing_to_everything(name: str, fit_stores: Path) -> None:
    """Budgets from the smallest, where everything streams, to one where everything stays; `NullTier` checks verbs."""
    model, batch, _ = ZOO[name]()
    expected = plain(model, batch)
    model.eval()
    recorded = record_forward(model, batch, call_model)
    make = partial(plan_forward, model, recorded, stores=fit_stores, effort=QUICK, lower_tier=LOWER_TIER)
    with pytest.raises(Infeasible) as caught:
        make(Resting(1, frozenset(), (), False))
    smallest = caught.value.smallest_feasible_bytes
    plenty = make(Resting(1 << 40, frozenset(), (), False))
    peaks = []
    for budget in (smallest, (smallest + plenty.summary.device_peak_bytes) // 2, plenty.summary.device_peak_bytes):
        planned = make(Resting(budget, frozenset(), (), False))
        tier = NullTier()
        offloading = Offloading(tier, model, None)
        source, known = planned.source, planned.manifest.source_hash
        program = bind(source, known, f"{known}.py", planned.trace, model, None, planned.slots, offloading)
        for _ in range(2):
            assert_same_outputs(recorded.form.fill(program.forward(batch)), expected)
        assert tier.unwaited == []
        offloading.fetch_all()
        peaks.append(planned.summary.device_peak_bytes)
        assert peaks[-1] <= budget
        assert [r.node for r in planned.rows if r.node >= 0] == list(range(len(planned.nodes))), "each node once"
    assert peaks[0] == smallest < peaks[-1]
    assert plenty.slots == []


class Odd(nn.Module):
    """Returns a weight, a constant, its input, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": [self.layer(x), 3], "w": self.layer.weight, "x": x, "one": torch.tensor([1.0, 2.0])}


def test_what_is_returned_is_the_callers_own(fit_stores: Path) -> None:
    model, x = Odd(), torch.randn(2, 4)

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        del batch
        return outputs["y"][0].sum()

    step = fit(model, x, adamw, loss=loss, device_budget="300%", cache_dir=fit_stores, quick=True)
    for _ in range(2):
        found = step.evaluate(x)
        assert same(found["y"][0], plain_call(model, x)["y"][0])
        assert found["y"][1] == 3
        assert found["x"] is x
        assert same(found["w"], model.layer.weight.detach())
        assert same(found["one"], torch.tensor([1.0, 2.0]))
        found["one"].zero_()
        found["w"].zero_()
    model.forward = lambda x: "nothing"  # type: ignore[method-assign]
    with pytest.raises(TraceError, match="without a tensor"):
        step.evaluate(torch.randn(3, 4))


def plain_call(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)
