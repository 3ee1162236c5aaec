"""Train models under DDP and sharded, on the same batches of each rank, and say where they differ.

`python -m tests.sharding.beside_ddp STORES OPTIMIZER MODEL…` on each rank.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stowage import shard
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.structure import tensors_of, with_tensors
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.sharding.ranks import say
from tests.zoo import ZOO, Entry

ITERATIONS = 5
STATES = {"device, reshard": (False, False), "device, keep": (False, True), "host, reshard": (True, False),
          "host, keep": (True, True), "mixed": None}  # fmt: skip

Choose = Callable[[Sequence[ParameterGroup], ParallelMachine, int, int], list[GroupChoice]]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
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


MODELS = {**ZOO, "llama_lora": llama_lora}


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


def main(stores: Path, kind: str, names: Sequence[str]) -> None:
    faulthandler.dump_traceback_later(100, exit=False)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        model, batch, loss = MODELS[name]()
        ddp = DistributedDataParallel(model)
        optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
        losses = train(ddp, optimizer, batch, loss)
        expected = content(model, optimizer)
        for state in STATES:
            model, batch, loss = MODELS[name]()
            optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
            plan = shard(
                model, batch, optimizer, device_budget="1GiB", loss=loss, choices=state_of(state), cache_dir=stores
            )
            found = train(model, optimizer, batch, loss)
            groups = [g.modules[0] for g in plan.groups]
            wrong = differences(content(model, optimizer), expected)
            say({"model": name, "state": state, "groups": groups, "losses": losses == found, "wrong": wrong})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
