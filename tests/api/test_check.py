"""What has changed unseen is noticed: at the next call that is compared with plain PyTorch, in one sentence."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import ParameterError, StaleStep
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import sample_batch
from tests.runtime.beside_eager import differences, same

Fit = Callable[..., TrainingStep]


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def quick(fit_stores: Path, notices: list[str]) -> Fit:
    def say(text: str) -> None:
        if not text.startswith(("Planned in", "Planning")):  # what every plan says
            notices.append(text)

    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="150%", say=say)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def network(seed: int = 0) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def batch_of(rows: int = 8, seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)),)


class Hidden:
    """A number where no walk over Python's objects finds it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, str(folder / "scale.txt")
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE scales (value REAL)")
        self.set(1.0)

    def set(self, value: float) -> None:
        Path(self.path).write_text(str(value))
        self.database.execute("DELETE FROM scales")
        self.database.execute("INSERT INTO scales VALUES (?)", (value,))
        _scale.cache_clear()

    def reader(self) -> Callable[[], float]:
        path, database = self.path, self.database
        readers: dict[str, Callable[[], float]] = {
            "file": lambda: float(Path(path).read_text()),
            "database": lambda: database.execute("SELECT value FROM scales").fetchone()[0],
            "cache": lambda: _scale(path),
        }
        return readers[self.kind]


@functools.lru_cache
def _scale(path: str) -> float:
    return float(Path(path).read_text())


KINDS = ["file", "database", "cache"]


def scaled_loss(read: Callable[[], float]) -> Callable[[Any, Any], torch.Tensor]:
    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        del batch
        result: torch.Tensor = outputs.pow(2).mean() * read()
        return result

    return loss


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any) -> torch.Tensor:
    value: torch.Tensor = loss(model(*batch), batch)
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unseen_change_is_caught_at_the_next_power_of_two(kind: str, quick: Fit, tmp_path: Path) -> None:
    hidden = Hidden(kind, tmp_path)
    loss = scaled_loss(hidden.reader())
    model, batch = network(), batch_of()
    step = quick(model, batch, momentum, loss=loss)
    for _ in range(4):
        step(batch)
    hidden.set(0.5)
    for _ in range(3):
        step(batch)  # nobody has looked
    with pytest.raises(StaleStep) as caught:
        step(batch)
    text = str(caught.value)
    assert (caught.value.call, caught.value.agreed) == (8, 4)
    assert "after number 4 and at the latest this one, number 8" in text
    assert all(part in text for part in ("plain PyTorch gives", "in the batch", "weights have been updated"))
    assert "\n" not in text

    other = network()
    other.load_state_dict(model.state_dict())
    optimizer = momentum(other.parameters())
    assert step.optimizer is not None
    optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    for _ in range(3):  # planned anew, with what holds now
        state = torch.get_rng_state()
        found = step(batch)
        torch.set_rng_state(state)
        assert same(found.detach(), plain_step(other, optimizer, batch, loss))
    assert differences(model, other) == []


def test_always_catches_at_once_and_never_does_not(quick: Fit, tmp_path: Path) -> None:
    hidden = Hidden("file", tmp_path)
    loss, batch = scaled_loss(hidden.reader()), batch_of()
    step = quick(network(), batch, momentum, loss=loss, check="always")
    for _ in range(5):
        step(batch)
    hidden.set(2.0)
    with pytest.raises(StaleStep, match="after number 5 and at the latest this one, number 6"):
        step(batch)
    step = quick(network(), batch, momentum, loss=loss, check="never")
    hidden.set(3.0)
    for _ in range(4):
        step(batch)


def test_forget_plans_anew(quick: Fit, tmp_path: Path) -> None:
    hidden = Hidden("database", tmp_path)
    loss, batch = scaled_loss(hidden.reader()), batch_of()
    step = quick(network(), batch, momentum, loss=loss, check="always")
    for scale in (1.0, 0.25, 4.0):
        hidden.set(scale)
        step.forget()
        for _ in range(2):
            step(batch)


def test_a_wrong_check_is_one_sentence(quick: Fit) -> None:
    with pytest.raises(ParameterError, match="check is 'sometimes'"):
        quick(network(), batch_of(), momentum, loss=scaled_loss(lambda: 1.0), check="sometimes")


def test_nan_equals_nan(quick: Fit) -> None:
    batch = (torch.full((8, 4), float("nan")),)
    step = quick(network(), batch, momentum, loss=scaled_loss(lambda: 1.0), check="always")
    for _ in range(2):
        assert step(batch).isnan()


def test_statistics_once_and_generators_as_in_plain_pytorch(quick: Fit) -> None:
    model, other = network(), network()
    loss = scaled_loss(lambda: 1.0)
    step, optimizer = quick(model, batch_of(), momentum, loss=loss, check="always"), momentum(other.parameters())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    for i in range(4):
        batch = batch_of(seed=i)
        torch.set_rng_state(state)
        expected = plain_step(other, optimizer, batch, loss)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert same(step(batch).detach(), expected)
        assert torch.equal(torch.get_rng_state(), after)
        state = after
    assert differences(model, other) == [], "batch normalisation has counted each batch once"
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # type: ignore[index, union-attr]


def test_python_generators_that_a_plan_does_not_draw_from(quick: Fit, tmp_path: Path) -> None:
    """Drawn where tracing does not see it: after the plan was made."""
    flag = tmp_path / "flag"
    draws: list[Callable[[], Any]] = []

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        del batch
        if flag.exists():
            draws[0]()
        result: torch.Tensor = outputs.pow(2).mean()
        return result

    for draw, name in ((random.random, "Python's"), (np.random.rand, "NumPy's"), (lambda: torch.rand(1), "PyTorch's")):
        flag.unlink(missing_ok=True)
        draws[:] = [draw]
        step = quick(network(), batch_of(), momentum, loss=loss)
        step(batch_of())
        flag.touch()
        with pytest.raises(StaleStep, match=f"left {name} generator"):
            step(batch_of())


def test_another_thread_draws(quick: Fit) -> None:
    """Once while it is traced, once beside the step: those that keep a connection alive draw too."""
    calls = itertools.count()  # which tracing does not put back

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        del batch
        if next(calls) in (0, 4):  # the first trace; what plain PyTorch is for the second call
            thread = threading.Thread(target=random.random)
            thread.start()
            thread.join()
        result: torch.Tensor = outputs.pow(2).mean()
        return result

    step = quick(network(), batch_of(), momentum, loss=loss)
    step(batch_of())
    assert next(calls) == 3
    step(batch_of())
    step(batch_of())


def test_a_buffer_that_goes_another_way(quick: Fit) -> None:
    """Its loss tells nothing: the momentum of batch normalisation counts in evaluation alone."""
    model, batch = network(), batch_of()

    class Momentum(float):
        """Not a plain number."""

    norm: Any = model.get_submodule("1")
    norm.momentum = Momentum(0.1)
    step = quick(model, batch, momentum, loss=scaled_loss(lambda: 1.0))
    step(batch)
    norm.momentum = Momentum(0.2)
    with pytest.raises(StaleStep, match=r"buffer '1\.running_mean'"):
        step(batch)


def language_model(seed: int = 0) -> tuple[nn.Module, list[Any]]:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    model = build_model("gpt2", sizes, seed=seed)
    return model, [sample_batch(model, 4, 64, i) for i in range(4)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def in_turns(step: TrainingStep, other: nn.Module, batches: list[Any], *, casts: bool = False) -> None:
    """Beside plain PyTorch, losses and weights bit for bit."""
    optimizer = adamw(other.parameters())
    for batch in batches:
        state = torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            found = step(batch)
            torch.set_rng_state(state)
            value = other(**batch).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same(found.detach(), value.detach())
    with step.on_device() as model:
        assert differences(model, other) == []


@pytest.mark.parametrize("budget", ["100%", "60%", "45%"])
def test_within_the_budget(budget: str, quick: Fit, notices: list[str]) -> None:
    model, batches = language_model()
    step = quick(model, batches[0], adamw, device_budget=budget)
    for batch in batches:  # each comparison is part of what is measured
        assert step.measure(batch).peak_bytes <= step.plan.device_budget_bytes
    assert notices == []


def test_without_room_it_waits_and_says_so_once(quick: Fit, notices: list[str]) -> None:
    model, batches = language_model()
    step = quick(model, batches[0], adamw)
    step(batches[0])
    (watched,) = step._net._watched.values()
    given, watched.budget_bytes = watched.budget_bytes, 4 * sum(p.nbytes for p in model.parameters())
    for batch in batches[1:]:
        step(batch)
    assert (watched.calls, watched.agreed) == (4, 1)
    assert len(notices) == 1
    assert "waits" in notices[0]
    watched.budget_bytes = given
    for batch in batches:
        step(batch)
    assert (watched.calls, watched.agreed) == (8, 8)


def test_autocast(quick: Fit, notices: list[str]) -> None:
    (model, batches), (other, _) = language_model(), language_model()
    with torch.autocast("cpu", torch.bfloat16):
        step = quick(model, batches[0], adamw, check="always", device_budget="60%")
    in_turns(step, other, batches, casts=True)
    assert notices == []


WIDE = 768
"""So that weights and states outweigh what the disk tier needs for itself."""


class Tied(nn.Module):
    """Weights that others read than the modules that own them: tied, by the parent, and by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDE)
        self.attention = nn.MultiheadAttention(WIDE, 4, batch_first=True)
        self.gate, self.inner, self.drop = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Dropout(0.1)
        self.head = nn.Linear(WIDE, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.drop(torch.nn.functional.linear(x, self.gate.weight, self.inner.bias).tanh())
        logits: torch.Tensor = self.head(self.inner(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def decayed(outputs: Any, batch: Any) -> torch.Tensor:
    del batch
    return outputs * 1.0  # type: ignore[no-any-return]


def test_offloaded_weights_come_for_the_modules_that_read_them(quick: Fit, notices: list[str], tmp_path: Path) -> None:
    with seeded(0):
        model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    batches = [(torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(i)),) for i in range(4)]
    step = quick(
        model,
        batches[0],
        adamw,
        loss=decayed,
        device_budget="62MiB",
        method="offmate",
        offload_dir=tmp_path,
        disk_budget="1GiB",
        check="always",
    )
    optimizer = adamw(other.parameters())
    for batch in batches:
        state = torch.get_rng_state()
        found = step.measure(batch)
        torch.set_rng_state(state)
        assert found.loss == float(plain_step(other, optimizer, batch, decayed))
        assert found.peak_bytes <= step.plan.device_budget_bytes
    (watched,) = step._net._watched.values()
    assert (watched.calls, watched.agreed) == (4, 4)
    assert step.programs.offloading is not None
    assert step.programs.offloading.offloaded_parameters()
    assert notices == []
    with step.on_device():
        assert differences(model, other) == []


def test_each_micro_batch_is_compared_by_its_own_count(quick: Fit, tmp_path: Path) -> None:
    hidden = Hidden("file", tmp_path)
    loss, batch = scaled_loss(hidden.reader()), batch_of()
    step = quick(network(), batch, momentum, loss=loss, accumulate=3)
    for _ in range(2):
        for update in (False, False, True):
            step(batch, update=update)
    hidden.set(2.0)
    step(batch, update=False)  # the third of this program
    step(batch, update=False)
    step(batch, update=True)
    with pytest.raises(StaleStep, match="number 4"):
        step(batch, update=False)


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1}, {"accumulate": 2}, {"optimizer": None}])
def test_gradients_are_compared_and_everything_is_put_back(
    settings: dict[str, Any], quick: Fit, notices: list[str]
) -> None:
    """Twice the same training, one with the comparison."""
    (model, batches), (other, _) = language_model(), language_model()
    settings = {"optimizer": adamw, "device_budget": "70%", **settings}
    steps = [quick(m, batches[0], check=c, **settings) for m, c in ((model, "gradients"), (other, "never"))]
    updates = [False, True] * 2 if "accumulate" in settings else [True] * 4
    for batch, update in zip(batches, updates, strict=True):
        state = torch.get_rng_state()
        found = steps[0](batch, update=update)
        torch.set_rng_state(state)
        assert same(found.detach(), steps[1](batch, update=update).detach())
        assert differences(model, other) == []
        if steps[0].optimizer is not None and steps[1].optimizer is not None:
            assert same(steps[0].optimizer.state_dict(), steps[1].optimizer.state_dict())
    assert notices == []


class Skewed(torch.autograd.Function):
    """Its gradient hangs on a number that nobody sees, its value does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float(Path(Odd.path).read_text())


class Odd(nn.Module):
    path = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(Skewed.apply(self.first(x)))
        return y.pow(2).mean()


def test_a_gradient_that_differs_is_named(quick: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = tmp_path / "scale"
    scale.write_text("1")
    monkeypatch.setattr(Odd, "path", str(scale))
    with seeded(0):
        model = Odd()
    step = quick(model, batch_of(), momentum, check="gradients")
    scale.write_text("2")
    with pytest.raises(StaleStep, match=r"another gradient of parameter 'first\.(weight|bias)'"):
        step(batch_of())
    step(batch_of())


def test_an_update_that_differs_is_named(quick: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    step = quick(network(), batch_of(), momentum, loss=scaled_loss(lambda: 1.0), check="gradients")
    update = torch.optim.SGD.step
    doubled: list[int] = []

    def once_more(self: Any, closure: Any = None) -> Any:
        if not doubled:  # plain PyTorch comes first
            doubled.append(1)
            update(self)
        return update(self)

    monkeypatch.setattr(torch.optim.SGD, "step", once_more)
    with pytest.raises(StaleStep, match=r"another parameter '0\.weight' than plain PyTorch"):
        step(batch_of())


def test_evaluation_is_compared_too(quick: Fit, tmp_path: Path) -> None:
    hidden = Hidden("database", tmp_path)
    read = hidden.reader()
    model, batch = network(), batch_of()
    step = quick(model, batch, momentum, loss=scaled_loss(lambda: 1.0))

    def scaled(model: nn.Module, batch: Any) -> Any:
        return model(*batch) * read(), "in words"

    for _ in range(2):
        step.evaluate(batch, scaled)
    hidden.set(3.0)
    step.evaluate(batch, scaled)
    with pytest.raises(StaleStep, match="after number 2 and at the latest this one, number 4") as caught:
        step.evaluate(batch, scaled)
    assert "weights" not in str(caught.value)
    found, words = step.evaluate(batch, scaled)
    model.eval()
    with torch.no_grad():
        assert same(found, model(*batch) * 3.0)
    assert words == "in words"
