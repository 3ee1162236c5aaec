"""`fit` and `stow` where planning is installed too: weights from a file, evaluation, saving, going on, the Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stowage.stages.ir.machine import DISK_STAGING_BYTES
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from tests.gpu.conftest import CUDA

MISSING = [name for name in ("pulp", "highspy", "ortools", "pydantic", "polars") if find_spec(name) is None]
"""Of what planning needs. (It is not imported here: OR-Tools must come before PuLP.)"""

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"planning needs {', '.join(MISSING)}")

WHERE = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=CUDA)]
"""On the CPU other tests have all of it, and more."""

STEPS = 4
LAYERS, ROWS = 5, 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs and plans."""
    return tmp_path_factory.mktemp("stores")


def network(width: int) -> nn.Module:
    """Weights outweigh activations; dropout, so that the random state matters."""
    with seeded(0):
        layers = [m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(width, 4))


def squares(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return outputs.pow(2).mean()


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, fused=True)


def agree(found: list[float], expected: list[float], device: str) -> bool:
    """The same numbers; on a GPU up to rounding, for the CPU may have updated some weights."""
    return found == expected if device == "cpu" else found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("device", WHERE, indirect=True)
def test_weights_from_a_file(device: str, stores: Path, tmp_path: Path) -> None:
    """Not half of the training state fits. What is saved after two steps goes on as if nothing had happened."""
    from stowage.flows import fit

    width = 768 if device == "cpu" else 2048
    save_file(network(width).state_dict(), tmp_path / "model.safetensors")
    batch = (torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(device),)
    state = 3 * 4 * LAYERS * width * width
    lower_tier = {"offload_dir": tmp_path / "lower_tier"} if device == "cpu" else {"host_budget": "4GiB"}

    def fitted() -> Any:
        with torch.device("meta"):
            model = network(width)
        return fit(
            model,
            batch,
            adamw,
            loss=squares,
            device_budget=3 * state // 10 + (DISK_STAGING_BYTES if device == "cpu" else 0),
            weights=tmp_path / "model.safetensors",
            cache_dir=stores,
            quick=True,
            say=lambda text: None,
            **lower_tier,
        )

    plain = network(width).to(device)
    optimizer = adamw(plain.parameters())

    def plain_step() -> float:
        loss = squares(plain(*batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    torch.manual_seed(3)
    expected = [plain_step() for _ in range(STEPS)]
    first = fitted()
    torch.manual_seed(3)
    losses = [float(first(batch)) for _ in range(2)]
    assert first.plan.offload_bytes > 0
    first.save(tmp_path / "checkpoint")
    assert agree([*losses, *(float(first(batch)) for _ in range(2))], expected, device)
    measured = first.measure(batch).peak_bytes
    assert measured <= first.plan.device_budget_bytes
    again = fitted()
    again.load(tmp_path / "checkpoint")
    assert agree([*losses, *(float(again(batch)) for _ in range(2))], expected, device)
    with torch.no_grad():
        outputs = plain.eval()(*batch)
    assert torch.allclose(again.evaluate(batch), outputs, rtol=0 if device == "cpu" else 1e-3, atol=1e-6)


def rows(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(0, 96, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


@pytest.mark.parametrize("device", WHERE, indirect=True)
def test_the_trainer(device: str, stores: Path, tmp_path: Path) -> None:
    """Losses, norms, weights and states of a plain Trainer, with less memory, and after going on from a checkpoint."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed")
    from transformers import Trainer, TrainingArguments

    from stowage.flows import stow

    if torch.cuda.device_count() > 1:
        pytest.skip("the Trainer would take all devices")
    given = rows(8, 16 if device == "cpu" else 512)

    def trainer(folder: str) -> Any:
        arguments = TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=2,
            num_train_epochs=1,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=3,
        )
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 512, "vocab_size": 96}
        return Trainer(build_model("gpt2", sizes, seed=0), arguments, train_dataset=given)

    def planned(folder: str) -> Any:
        return stow(trainer(folder), device_budget="90%", cache_dir=stores, quick=True, say=lambda text: None)

    def logged(trainer: Any) -> list[tuple[float, float]]:
        return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]

    plain = trainer("plain")
    plain.train()
    first = planned("planned")  # which seeds the generators, as the plain one did
    first.train()
    assert len(logged(plain)) == 4
    assert logged(first) == logged(plain)
    second = planned("again")
    second.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
    assert logged(second) == logged(plain)
    for one in (first, second):
        for (name, mine), theirs in zip(one.model.named_parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
