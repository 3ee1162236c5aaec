"""A plain forward beside a planned step: it keeps nothing, leaves nothing behind, and stays within its room."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stowage.stages.device import measure_allocations
from stowage.stages.device.tiers import NullTier
from stowage.stages.ir.errors import OffloadedError
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.shadow import forward_reads
from stowage.stages.runtime.offload.offloaded_tensor import OffloadedTensor
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.random.generators import GeneratorStates
from stowage.stages.runtime.random.python_state import PythonState
from stowage.stages.runtime.shadow.guard import NoRoom, ReadsOffloaded, Room
from stowage.stages.runtime.shadow.shadow import Shadow
from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.runtime.beside_eager import same

AMPLE = Room(1 << 30, True)
MEMORY: dict[str, Any] = {"steps": 0, "norms": []}


class Restless(nn.Module):
    """Writes in forward whatever one can write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(4))
        self.queue = torch.zeros(2, 4)
        self.calls, self.log, self.seen = 0, [0.0], {"x": None}
        self.recent: deque[float] = deque(maxlen=3)
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(float(self.calls))
        self.recent.append(1.0)
        self.seen["x"] = x
        self.new = x.sum()
        MEMORY["steps"] += 1
        MEMORY["norms"].append(x.norm())
        y: torch.Tensor = self.second(self.drop(self.norm(self.first(x))))
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        with torch.no_grad():
            self.queue.copy_(torch.cat([y[:1], self.queue[:1]]))
            self.second.weight.clamp_(-0.1, 0.1)
            x[0].zero_()
        scale = self.python.random() + self.numpy.random() + random.random() + np.random.rand()
        scale += torch.rand(1, generator=self.torch).item()
        self.first.requires_grad_(False)
        self.train(not self.training)
        return (y * scale).pow(2).mean()


def state_of(model: Restless, x: torch.Tensor) -> Any:
    return (
        [t.clone() for t in (*model.state_dict().values(), model.queue, x)],
        [p.requires_grad for p in model.parameters()],
        [m.training for m in model.modules()],
        (model.calls, list(model.log), list(model.recent), dict(model.seen), hasattr(model, "new")),
        (MEMORY["steps"], len(MEMORY["norms"])),
        (model.python.getstate(), model.numpy.bit_generator.state, model.torch.get_state()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]),  # type: ignore[index, union-attr]
    )


@pytest.mark.parametrize("room", [AMPLE, Room(1 << 30)])
def test_nothing_is_left_behind(room: Room) -> None:
    torch.manual_seed(0)
    model, x = Restless(), torch.randn(6, 8)
    shadow = Shadow(model, lambda model, batch: model(batch))  # type: ignore[no-any-return]
    before = state_of(model, x)
    seen = [shadow.run(x, room, None) for _ in range(3)]
    assert same(state_of(model, x), before)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loss = model(x).detach()
    assert all(s.result.value == float(loss) for s in seen), "what the user's own forward gives, each time"
    assert seen[0].generators.difference(GeneratorStates.now(x.device)) is None
    assert random.getstate() != generators[1]


def test_what_functions_hold_is_put_back() -> None:
    steps, log = 0, OrderedDict(a=1, b=[2])

    class Config:
        scale = 1.0
        __slots__ = ("rate",)

        def __init__(self) -> None:
            self.rate = 0.5

    config = Config()

    def loss(factor: float, config: Config, value: float) -> float:
        nonlocal steps
        steps += 1
        log["b"].append(3)  # type: ignore[attr-defined]
        log["c"] = log.pop("a")
        config.rate *= 2
        Config.scale += 1
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        return factor * value * steps

    bound = partial(loss, 2.0, config)
    state = PythonState((bound,))
    assert bound(3.0) == 6.0
    state.restore()
    assert (steps, list(log.items()), config.rate, Config.scale) == (0, [("a", 1), ("b", [2])], 0.5, 1.0)
    assert not hasattr(loss, "calls")
    assert bound(3.0) == 6.0


def test_a_forward_that_fails_leaves_nothing_behind_either() -> None:
    torch.manual_seed(0)
    model, x = Restless(), torch.randn(6, 8)
    before = state_of(model, x)

    def fails(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Shadow(model, fails).run(x, AMPLE, None)
    assert same(state_of(model, x), before)


def gpt2() -> tuple[nn.Module, Any]:
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    model = build_model("gpt2", sizes, seed=0)
    return model, sample_batch(model, 4, 64, 0)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


def allocated(work: Callable[[], Any]) -> int:
    return measure_allocations(work).peak_bytes


def test_almost_no_memory() -> None:
    model, batch = gpt2()
    plain = allocated(lambda: loss_of(model, batch))
    with torch.no_grad():
        without = allocated(lambda: loss_of(model, batch))
    shadow = Shadow(model, loss_of)
    shadow.run(batch, AMPLE, None)
    taken = allocated(lambda: shadow.run(batch, AMPLE, None))
    assert taken <= 1.05 * without < 0.25 * plain
    assert taken <= shadow.peak_bytes + 16384, "generators' states come besides"


def test_the_room_is_kept_to_the_byte() -> None:
    """What is known after a run is enough for the next, and one byte less is not."""
    model, batch = gpt2()
    shadow = Shadow(model, loss_of)
    seen = shadow.run(batch, Room(1 << 30), None)
    known = shadow.peak_bytes
    fresh = Shadow(model, loss_of)
    assert fresh.run(batch, Room(known), None).result == seen.result
    with pytest.raises(NoRoom):
        Shadow(model, loss_of).run(batch, Room(known - 1), None)
    for room in (known // 2, known // 5, 1000):
        stopped = Shadow(model, loss_of)

        def tries(stopped: Shadow = stopped, room: int = room) -> None:
            with pytest.raises(NoRoom):
                stopped.run(batch, Room(room), None)

        assert allocated(tries) <= room + 16384


class Penalty(nn.Module):
    """Differentiates its own output, as WGAN-GP does: what forward saves is needed within it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes: torch.Tensor = torch.func.vmap(torch.func.grad(lambda row: self.net(row).tanh().sum()))(x)
        return slopes.pow(2).mean()


@pytest.mark.parametrize("kind", [Penalty, Functional])
def test_a_forward_that_differentiates(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(5, 4)
    shadow = Shadow(model, lambda model, batch: model(batch))  # type: ignore[no-any-return]
    for _ in range(2):
        assert shadow.run(x, Room(1 << 20), None).result.value == float(model(x).detach())
    assert all(p.grad is None for p in model.parameters())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.pow(2).mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_models_own_checkpointing_stays_on(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant), torch.randn(4, 8, requires_grad=True)
    state = torch.get_rng_state()
    seen = Shadow(model, lambda model, batch: model(batch)).run(x, AMPLE, None)  # type: ignore[no-any-return]
    assert torch.equal(torch.get_rng_state(), state)
    assert seen.result.value == float(model(x).detach())
    assert seen.generators.difference(GeneratorStates.now(x.device)) is None


class Tied(nn.Module):
    """Weights that others read than the modules that own them: tied, by the parent, by the loss, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = nn.functional.linear(x, self.gate.weight.t(), self.inner.bias).tanh()
        logits: torch.Tensor = self.head(self.inner(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tied_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch) + 1e-3 * model.get_parameter("gate.bias").pow(2).sum()
    return found


def all_offloaded(model: nn.Module) -> Offloading:
    offloading = Offloading(NullTier(), model, None)
    slots = [
        Slot(i, name, p.nbytes, "parameter", "offloaded", copied=True)
        for i, (name, p) in enumerate(model.named_parameters())
    ]
    offloading.enter(slots)
    assert len(offloading.offloaded_parameters()) == len(slots)
    return offloading


def test_every_weight_is_brought_to_whoever_reads_it() -> None:
    torch.manual_seed(0)
    model, batch = Tied(), torch.randint(16, (3, 5))
    state = torch.get_rng_state()
    expected = float(tied_loss(model, batch).detach())
    torch.set_rng_state(state)
    trace = trace_step(model, batch, objective=tied_loss)
    offloading = all_offloaded(model)
    shadow = Shadow(model, tied_loss, reads=forward_reads(trace))
    before = set(offloading.offloaded_parameters())
    assert shadow.run(batch, Room(1 << 20), offloading).result.value == expected
    assert set(offloading.offloaded_parameters()) == before
    assert all(isinstance(p, OffloadedTensor) for p in model.parameters()), "what stands for them is in its place again"
    with pytest.raises(OffloadedError):
        model(batch)
    everything = sum(p.nbytes for p in model.parameters())
    assert shadow.peak_bytes < everything + 4096
    with pytest.raises(NoRoom):
        Shadow(model, tied_loss, reads=forward_reads(trace)).run(batch, Room(shadow.peak_bytes // 2), offloading)
    assert set(offloading.offloaded_parameters()) == before


def test_a_weight_that_nobody_was_known_to_read_is_not_read_as_nan() -> None:
    torch.manual_seed(0)
    model, batch = Tied(), torch.randint(16, (3, 5))
    offloading = all_offloaded(model)
    with pytest.raises(ReadsOffloaded, match=r"gate\.weight|attention\.out_proj|gate\.bias|inner\.bias"):
        Shadow(model, tied_loss).run(batch, Room(1 << 20), offloading)
    assert all(isinstance(p, OffloadedTensor) for p in model.parameters())
