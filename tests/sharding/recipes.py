"""Tiny training scripts of every kind that ranks have to get right: model, optimizer, and a batch for each rank.

`RECIPES[name]()` makes the same model with the same weights on every rank; dropout is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stowage.flows import MasterWeights
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import seeded
from stowage.stages.workload.samples import sample_batch
from tests.freezing.chosen_kernels import Windows
from tests.optimizers.kinds import Lion
from tests.zoo import GPT2, LLAMA, ZOO, Entry, Loss

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """What a user of several ranks has written.

    Attributes:
        model: the module, in training mode.
        loss: `loss(outputs, batch)`; None where the outputs have a `.loss`.
        batch: `batch(number)` makes a batch; each rank asks for other numbers.
    """

    model: nn.Module
    loss: Loss | None
    batch: Callable[[int], Any]


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW of what trains."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def momentum(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """SGD with momentum of what trains."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=1e-2, momentum=0.9)


def lion(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Lion of what trains: a user's own class."""
    return Lion([p for p in parameters if p.requires_grad])


def adagrad(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Adagrad of what trains, which has states when it is made."""
    return torch.optim.Adagrad([p for p in parameters if p.requires_grad], lr=1e-2, initial_accumulator_value=0.1)


def stepped(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW that has stepped before."""
    found = adamw(list(parameters))
    with seeded(9):
        for parameter in found.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
    found.step()
    found.zero_grad(set_to_none=True)
    return found


def masters(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW of master copies in float32 of what trains."""
    return MasterWeights([p for p in parameters if p.requires_grad], torch.optim.AdamW, lr=1e-2)


def gpt2() -> Recipe:
    """Return GPT-2, whose head is its embedding."""
    return _language("gpt2", **GPT2 | {"n_layer": 2})


def gpt2_bf16() -> Recipe:
    """Return the same in bfloat16, as those who keep master copies have it."""
    found = gpt2()
    return Recipe(found.model.to(torch.bfloat16), found.loss, found.batch)


def t5() -> Recipe:
    """Return T5: encoder, decoder and head read one weight."""
    return _language("t5", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64)


def wide_t5() -> Recipe:
    """Return T5 with wider layers, whose weights take more than the disk's buffers."""
    return _language("t5", d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=64)


def _language(architecture: str, **overrides: Any) -> Recipe:
    model = build_model(architecture, overrides, seed=0)
    return Recipe(model, None, lambda number: sample_batch(model, 4, 12, number))


def llama_lora() -> Recipe:
    """Return Llama with adapters: its own weights do not train."""
    return _with_adapters()


def deep_llama_lora() -> Recipe:
    """Return the same with more and wider layers, whose weights take most of the memory."""
    return _with_adapters(hidden_size=64, intermediate_size=128, num_hidden_layers=4)


def thick_llama_lora() -> Recipe:
    """Return the same with adapters that are worth offloading, each half of them too."""
    return _with_adapters(32, hidden_size=64, intermediate_size=128)


def _with_adapters(rank: int = 4, **overrides: Any) -> Recipe:
    from peft import LoraConfig, get_peft_model

    model = build_model("llama", LLAMA | overrides, seed=0)
    with seeded(0):
        adapted = get_peft_model(model, LoraConfig(r=rank, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return Recipe(adapted.train(), None, lambda number: sample_batch(model, 4, 12, number))


class _Dropped(nn.Module):
    """A head behind dropout: no list of layers, which would count as blocks."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.dropout, self.head = nn.Dropout(0.1), head

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.dropout(x))


def resnet_with_dropout() -> Entry:
    """Return the ResNet of the zoo with dropout before its head: each rank has random numbers of its own."""
    model, batch, loss = ZOO["resnet"]()
    model.head = _Dropped(model.get_submodule("head"))
    return model.train(), batch, loss


def resnet() -> Recipe:
    """Return ResNet with batch normalization, whose statistics are buffers, and dropout before its head."""
    model, _, loss = resnet_with_dropout()

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"x": torch.randn(4, 3, 16, 16)}

    return Recipe(model, loss, batch)


class _Odd(nn.Module):
    """Layers whose rows and elements no number of ranks divides, scalars and empty parameters among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, 5), nn.Linear(5, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.columns = nn.Parameter(torch.randn(13, 7).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) * self.scale + (x @ self.columns.t()).sum(1, keepdim=True) + self.nothing.sum()


def odd() -> Recipe:
    """Return a small network of odd sizes."""

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"x": torch.randn(64, 13)}

    with seeded(0):
        model = _Odd()
    return Recipe(model.train(), lambda outputs, _batch: outputs.pow(2).mean(), batch)


def wide() -> Recipe:
    """Return a network whose shards are large enough to be offloaded."""

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"input": torch.randn(32, 16)}

    with seeded(0):
        layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU(), nn.Dropout(0.1))]
        model = nn.Sequential(nn.Linear(16, 1024), *layers, nn.Linear(1024, 4))
    return Recipe(model.train(), lambda outputs, _batch: outputs.pow(2).mean(), batch)


def normalized() -> Recipe:
    """Return linear layers with batch normalization: it has buffers, and no convolution, whose workspaces vary."""

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"input": torch.randn(16, 16)}

    with seeded(0):
        layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.BatchNorm1d(128), nn.GELU())]
        model = nn.Sequential(nn.Linear(16, 128), *layers, nn.Dropout(0.1), nn.Linear(128, 4))
    return Recipe(model.train(), lambda outputs, _batch: outputs.pow(2).mean(), batch)


class _Mixer(nn.Module):
    """Mixes positions by linear layers of a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.channels = nn.LayerNorm(48), nn.Linear(48, 48)
        self.widen, self.narrow = nn.Linear(40, 80), nn.Linear(80, 40)

    def forward(self, x: torch.Tensor) -> Any:
        mixed = self.narrow(nn.functional.dropout(nn.functional.gelu(self.widen(self.norm(x).mT)), 0.1)).mT
        return self.channels(x + mixed)


def mixer() -> Recipe:
    """Return a network of whose products PyTorch chooses kernels by what trains."""

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"input": torch.randn(3, 40, 48)}

    with seeded(0):
        model = nn.Sequential(_Mixer(), _Mixer())
    return Recipe(model.train(), lambda outputs, _batch: outputs.pow(2).mean(), batch)


def windows() -> Recipe:
    """Return a network whose attention has a learnt bias, whose kernels PyTorch chooses by whether that trains."""

    def batch(number: int) -> dict[str, torch.Tensor]:
        with seeded(number):
            return {"input": torch.randn(3, 40, 48)}

    with seeded(0):
        model = nn.Sequential(Windows(network=False), nn.Dropout(0.1), Windows(network=True))
    return Recipe(model.train(), lambda outputs, _batch: outputs.pow(2).mean(), batch)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "gpt2": gpt2,
    "gpt2_bf16": gpt2_bf16,
    "t5": t5,
    "wide_t5": wide_t5,
    "llama_lora": llama_lora,
    "deep_llama_lora": deep_llama_lora,
    "thick_llama_lora": thick_llama_lora,
    "resnet": resnet,
    "normalized": normalized,
    "mixer": mixer,
    "windows": windows,
    "odd": odd,
    "wide": wide,
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "momentum": momentum,
    "lion": lion,
    "masters": masters,
    "adagrad": adagrad,
    "stepped": stepped,
}
