"""Train models under DDP and sharded, on the same batches of each rank, and say where they differ.

`python -m tests.sharding.beside_ddp STORES OPTIMIZER:MODEL…` on each rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stowage import shard
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.structure import tensors_of, with_tensors
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.optimizers.kinds import Lion
from tests.sharding.ranks import say
from tests.sharding.recipes import resnet_with_dropout
from tests.zoo import ZOO, Entry

ITERATIONS = 5
STATES = {"device, reshard": (False, False), "device, keep": (False, True), "host, reshard": (True, False),
          "host, keep": (True, True), "mixed": None}  # fmt: skip

Choose = Callable[[Sequence[ParameterGroup], ParallelMachine, int, int], list[GroupChoice]]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "lion": Lion,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def llama_lora() -> Entry:
    """Adapters on a frozen base, with dropout."""
    import peft

    base = build_model(
        "llama",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 32, "vocab_size": 64},
        seed=0,
    )  # fmt: skip
    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: nn.Module = peft.get_peft_model(base, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return model.train(), sample_batch(base, 2, 12, 1), None


def llama_checkpointed() -> Entry:
    """Blocks that run again in backward, with dropout."""
    model, batch, loss = ZOO["llama"]()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, batch, loss


MODELS = {**ZOO, "llama_lora": llama_lora, "llama_checkpointed": llama_checkpointed, "resnet": resnet_with_dropout}


def state_of(name: str) -> Choose:
    """Return a function that chooses the same state for all groups, or each state in turn."""
    fixed = STATES[name]

    def choose(groups: Sequence[ParameterGroup], *_: Any) -> list[GroupChoice]:
        def of(number: int) -> tuple[bool, bool]:
            return fixed if fixed is not None else (number % 4 >= 2, number % 2 == 1)

        return [GroupChoice(g.group, *of(g.group)) for g in groups]

    return choose


def varied(batch: Any, seed: int) -> Any:
    """Return a batch of the same form with other content: numbers in another order."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bool or tensor.unique().numel() <= 2:
            return tensor.clone()
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)

    return with_tensors(batch, [other(t) for t in tensors_of(batch)])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any, iterations: int = ITERATIONS
) -> list[float]:
    """Train on this rank's own batches, with this rank's own random numbers."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    losses = []
    for i in range(iterations):
        given = varied(batch, 1000 * i + rank)
        outputs = model(**given)
        value = outputs.loss if loss is None else loss(outputs, given)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters, states and buffers, whole."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        for key, state in optimizer.state.get(parameter, {}).items():
            if isinstance(state, torch.Tensor):
                found[f"{name}::{key}"] = state
    found.update(model.named_buffers())
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor that is not equal bit for bit."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {
        name: float((ours[name].double() - theirs[name].double()).abs().max())
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    }


class _Together(torch.autograd.Function):
    """Hands tensors on as they are; their gradients are complete before any of them is handed back."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients


def sum_in_blocks(blocks: Iterable[nn.Module]) -> None:
    """Let the gradients of what enters a block be summed inside it first, as hooks of `fully_shard` do.

    A tensor that a block reads twice, such as T5's encoded source, otherwise gets its gradients one by one.
    """

    def hook(_module: nn.Module, arguments: Any, keywords: Any) -> Any:
        leaves, form = pytree.tree_flatten((arguments, keywords))
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if found:
            for i, tensor in zip(found, _Together.apply(*(leaves[i] for i in found)), strict=True):
                leaves[i] = tensor
        return pytree.tree_unflatten(leaves, form)

    for block in blocks:
        block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def under_ddp(name: str, kind: str, *, blocks: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model under DDP; return its losses and its content."""
    model, batch, loss = MODELS[name]()
    if blocks:
        sum_in_blocks([*model.encoder.block, *model.decoder.block])
    optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
    losses = train(DistributedDataParallel(model), optimizer, batch, loss)
    return losses, content(model, optimizer)


class Sharded(NamedTuple):
    """Losses, content, the paths of the groups, whether a warning of rounding was given, on the first rank, and the
    names of each group's parameters."""

    losses: list[float]
    content: dict[str, torch.Tensor]
    groups: list[str]
    warned: bool
    parameters: list[list[str]]


def sharded(name: str, kind: str, state: str, stores: Path) -> Sharded:
    """Train a model sharded."""
    model, batch, loss = MODELS[name]()
    optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        choose = state_of(state)
        plan = shard(model, batch, optimizer, device_budget="1GiB", loss=loss, choices=choose, cache_dir=stores)
    warned = [str(w.message) for w in said if "rounds the last elements" in str(w.message)]
    losses = train(model, optimizer, batch, loss)
    parameters = [list(group.parameters) for group in plan.groups]
    return Sharded(losses, content(model, optimizer), [g.modules[0] for g in plan.groups], bool(warned), parameters)


def main(stores: Path, cases: Sequence[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        kind, name = case.split(":")
        losses, expected = under_ddp(name, kind)
        grouped = under_ddp(name, kind, blocks=True) if name == "t5" else (losses, expected)
        for state in STATES:
            found, ours, groups, warned, _ = sharded(name, kind, state, stores)
            say(
                {
                    "case": case,
                    "state": state,
                    "groups": groups,
                    "warned": None if dist.get_rank() else warned,
                    "losses": found == losses,
                    "wrong": differences(ours, expected),
                    "grouped": found == grouped[0] and not differences(ours, grouped[1]),
                }
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
