"""`fit` where weights and states live in the host and on the disk behind it: the same bits, saved, loaded, killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stowage.flows.api.training_step import TrainingStep
from tests.api.host_and_disk_steps import BATCH, adamw, host_and_disk_step, loss_of, network, placements
from tests.matrix import some
from tests.runtime.beside_eager import differences, same

STEPS = 5


@cache
def eager() -> tuple[list[float], torch.nn.Module, torch.optim.Optimizer]:
    """Losses of plain PyTorch, and what it made."""
    model = network()
    optimizer = adamw(model.parameters())
    torch.manual_seed(3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(*BATCH), BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


def train(step: TrainingStep, count: int) -> list[float]:
    return [float(step(BATCH)) for _ in range(count)]


def assert_as_eager(step: TrainingStep) -> None:
    _, model, optimizer = eager()
    assert step.optimizer is not None
    with step.on_device() as planned:
        assert differences(planned, model) == []
        assert same(step.optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("cpu", some([0.0, 2e10], keep=[2e10]))
def test_a_run_that_is_saved_and_loaded_ends_like_plain_pytorch(cpu: float, fit_stores: Path, tmp_path: Path) -> None:
    first = host_and_disk_step(fit_stores, tmp_path, cpu_update_bytes_per_s=cpu)
    torch.manual_seed(3)
    losses = train(first, 3)
    assert placements(first)["disk"]
    assert {s.placement for s in first.planned.slots} == {"host", "disk"}
    assert any(r.action == "update" for r in first.planned.rows) == bool(cpu)
    first.save(tmp_path / "checkpoint")
    random = torch.get_rng_state()
    assert losses + train(first, STEPS - 3) == eager()[0], "saving changed nothing"
    again = host_and_disk_step(fit_stores, tmp_path, cpu_update_bytes_per_s=cpu)
    torch.manual_seed(99)
    again.load(tmp_path / "checkpoint")
    assert torch.equal(torch.get_rng_state(), random)
    assert losses + train(again, STEPS - 3) == eager()[0]
    assert_as_eager(again)


def test_weights_are_read_into_both_places(fit_stores: Path, tmp_path: Path) -> None:
    save_file(network().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = network()
    step = host_and_disk_step(fit_stores, tmp_path, model, weights=tmp_path / "model.safetensors")
    found = placements(step)
    assert found["host"]
    assert found["disk"]
    assert not any("::" in name for name in found["host"] | found["disk"]), "there are no states yet"
    torch.manual_seed(3)
    assert train(step, STEPS) == eager()[0]
    assert_as_eager(step)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.api.host_and_disk_steps import BATCH, placements, host_and_disk_step
folder = Path(sys.argv[2])
step = host_and_disk_step(Path(sys.argv[1]), folder)
step(BATCH)
step(BATCH)
print(all(placements(step).values()), os.listdir(folder), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_file(fit_stores: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(fit_stores), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout.strip() == "True []"
    assert list(tmp_path.iterdir()) == []
