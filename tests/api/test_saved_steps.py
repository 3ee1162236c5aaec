"""What a step saves and loads while weights and states are offloaded: the same bits, within the budget."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.device import measure_allocations, unique_bytes
from stowage.stages.ir.errors import Infeasible, ParameterError, StowageError, TableError
from stowage.stages.runtime.observe.measure import resident_tensors
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import differences, same
from tests.runtime.test_traced_iterations import check_chrome_trace

WIDTH = 1024
BATCH = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)),)


def network() -> nn.Module:
    """Wide layers, so that they are worth moving; dropout, so that the random state matters; statistics, and a weight
    that lies in memory in another order."""
    with seeded(0):
        layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 4))
        model[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).mul_(0.03).t())
        return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    made = list(parameters)
    return torch.optim.AdamW([{"params": made[:4], "weight_decay": 0.1}, {"params": made[4:]}], lr=1e-2)


def schedule(step: TrainingStep) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, 20)  # type: ignore[arg-type]


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return outputs.pow(2).mean()


@pytest.fixture(scope="module")
def from_disk(fit_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TrainingStep]:
    """Makes the same step again and again: it trains from disk, in a little more than the smallest budget."""
    folder = tmp_path_factory.mktemp("lower_tier")
    common: dict[str, Any] = {
        "loss": loss_of,
        "method": "offmate",
        "offload_dir": folder,
        "cache_dir": fit_stores,
        "quick": True,
    }
    with pytest.raises(Infeasible) as caught:
        fit(network(), BATCH, adamw, device_budget=1, **common)
    budget = int(1.1 * caught.value.smallest_feasible_bytes)

    def make() -> TrainingStep:
        return fit(network(), BATCH, adamw, device_budget=budget, **common)

    return make


def train(step: TrainingStep, schedule: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(float(step(BATCH)))
        schedule.step()
    return found


def lower_tier(step: TrainingStep) -> list[str]:
    assert step.programs.offloading is not None
    return sorted(step.programs.offloading.offloaded().values())


def trained(from_disk: Callable[[], TrainingStep], count: int = 2) -> TrainingStep:
    step = from_disk()
    torch.manual_seed(3)
    train(step, schedule(step), count)
    assert any("::" in name for name in lower_tier(step))
    assert any("::" not in name for name in lower_tier(step))
    return step


def test_a_checkpoint_between_micro_batches_is_refused(fit_stores: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    step = fit(
        model, batch, optimizer, device_budget="200%", loss=loss_of, accumulate=2, cache_dir=fit_stores, quick=True
    )
    step(batch, update=False)
    waiting = [p.grad for p in model.parameters()]
    with pytest.raises(ParameterError, match=r"The gradient of parameter '0\.weight' waits for an update"):
        step.save(tmp_path / "between")
    assert not (tmp_path / "between").exists()
    assert all(p.grad is own for p, own in zip(model.parameters(), waiting, strict=True))
    step(batch)
    step.save(tmp_path / "after")


def test_a_run_that_is_saved_and_loaded_ends_like_one_that_is_not(
    from_disk: Callable[[], TrainingStep], tmp_path: Path
) -> None:
    whole, first = from_disk(), from_disk()
    torch.manual_seed(3)
    rates = schedule(whole)
    expected = train(whole, rates, 6)
    random = torch.get_rng_state()

    torch.manual_seed(3)
    early = schedule(first)
    found = train(first, early, 3)
    first.save(tmp_path / "step", early)
    found += train(first, early, 1)  # saving changed nothing
    assert found == expected[:4]
    for _ in range(2):
        again = from_disk()
        torch.manual_seed(99)
        late = schedule(again)
        again.load(tmp_path / "step", late)
        assert train(again, late, 3) == expected[3:]
        assert torch.equal(torch.get_rng_state(), random)
    again.load(tmp_path / "step", late)  # also into a step whose states exist and are offloaded
    assert train(again, late, 3) == expected[3:]
    with whole.on_device() as one, again.on_device() as two:
        assert differences(one, two) == []
        assert whole.optimizer is not None
        assert again.optimizer is not None
        assert same(whole.optimizer.state_dict(), again.optimizer.state_dict())
        assert rates.state_dict() == late.state_dict()


def test_saving_and_loading_keep_to_the_budget(from_disk: Callable[[], TrainingStep], tmp_path: Path) -> None:
    step = trained(from_disk)
    state = sum(t.nbytes for t in resident_tensors(step.model, step.optimizer, BATCH))
    assert state > 1.2 * step.plan.device_budget_bytes, "else it could all be in memory at once"
    for work in (step.save, step.load, step.save_model, step.load_model):
        program = step.prepare(BATCH)
        program.enter()
        tensors = [*resident_tensors(step.model, step.optimizer, BATCH), *program.resident()]
        resident = unique_bytes(tensors) + program.staging_bytes
        measured = measure_allocations(partial(work, tmp_path / "file"), tensors)
        assert resident + measured.peak_bytes <= step.plan.device_budget_bytes, work.__name__


def test_a_model_file_is_what_others_read(from_disk: Callable[[], TrainingStep], tmp_path: Path) -> None:
    step = trained(from_disk)
    step.save_model(tmp_path / "model.safetensors")
    before = lower_tier(step)
    found = load_file(tmp_path / "model.safetensors")
    step.load_model(tmp_path / "model.safetensors")
    assert lower_tier(step) == before, "it does not stay in memory"
    with step.on_device() as model:
        expected = model.state_dict()
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
        assert all(torch.equal(found[k], v) for k, v in expected.items())
        other = network()
        other.load_state_dict(found)
        assert differences(model, other) == []
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_an_optimizer_file_comes_back(from_disk: Callable[[], TrainingStep], tmp_path: Path) -> None:
    step, other = trained(from_disk), from_disk()
    step.save_optimizer(tmp_path / "optimizer")
    step.save_model(tmp_path / "model")
    other.load_optimizer(tmp_path / "optimizer")
    other.load_model(tmp_path / "model")
    torch.manual_seed(7)
    expected = float(step(BATCH))
    torch.manual_seed(7)
    assert float(other(BATCH)) == expected
    assert step.optimizer is not None
    assert other.optimizer is not None
    with step.on_device(), other.on_device():
        assert same(step.optimizer.state_dict(), other.optimizer.state_dict())


def test_what_cannot_be_loaded_is_one_sentence(from_disk: Callable[[], TrainingStep], tmp_path: Path) -> None:
    step = from_disk()
    with pytest.raises(ParameterError, match="no checkpoint at"):
        step.load(tmp_path / "none")
    step.save_model(tmp_path / "model")
    with pytest.raises(TableError, match="holds the weights of a model alone"):
        step.load_optimizer(tmp_path / "model")
    step.save_optimizer(tmp_path / "optimizer")
    with pytest.raises(StowageError, match="holds the state of an optimizer alone"):
        step.load_model(tmp_path / "optimizer")
    with pytest.raises(ParameterError, match="has no save_pretrained: use save_model"):
        step.save_pretrained(tmp_path / "folder")


def test_tied_weights_and_save_pretrained(fit_stores: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    with seeded(0):
        model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.arange(32).view(2, 16)
    step = fit(
        model,
        {"input_ids": ids, "labels": ids},
        lambda p: torch.optim.SGD(p, lr=0.1),
        device_budget="150%",
        cache_dir=fit_stores,
        quick=True,
    )
    step({"input_ids": ids, "labels": ids})
    step.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert differences(read, model) == []
    assert read.lm_head.weight is read.transformer.wte.weight
    step.load_model(tmp_path / "model.safetensors")
    assert differences(read, model) == []


def test_a_step_writes_a_trace_of_itself(from_disk: Callable[[], TrainingStep], tmp_path: Path) -> None:
    step = trained(from_disk, 1)
    spans = step.trace(BATCH, tmp_path / "trace.json")
    check_chrome_trace((tmp_path / "trace.json").read_text())
    assert {s.stream for s in spans if s.series == "measured"} >= {"compute", "wait", "offload", "reload", "update"}
    assert step.plan.plan_hash in (tmp_path / "trace.json").read_text()
