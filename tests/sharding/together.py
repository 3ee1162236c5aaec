"""What ranks do together beside training: choose within budgets, refuse, fail, clip and save.

`python -m tests.sharding.together STORES [CASE…]` on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stowage import shard
from stowage.stages.ir.errors import StowageError
from stowage.stages.runtime.fsdp import apply
from tests.sharding.beside_ddp import content, differences, state_of, train, varied
from tests.sharding.ranks import say
from tests.zoo import ZOO

Case = Callable[[Path], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except StowageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def budgets(stores: Path) -> Any:
    """Plans between everything kept and everything resharded, and one that cannot be met."""
    found = {}
    for state in ("device, keep", "device, reshard"):
        model, batch, _ = ZOO["gpt2"]()
        plan = shard(model, batch, adamw(model), device_budget="1GiB", choices=state_of(state), cache_dir=stores)
        found[state] = plan.predicted_peak_bytes
    high, low = found.values()
    model, batch, _ = ZOO["gpt2"]()
    losses = train(DistributedDataParallel(model), adamw(model), batch, None)
    plans = {}
    for name, budget in {"high": high, "middle": (high + low) // 2, "low": low}.items():
        model, batch, _ = ZOO["gpt2"]()
        optimizer = adamw(model)
        plan = shard(model, batch, optimizer, device_budget=budget, cache_dir=stores)
        plans[name] = {
            "kept": sum(c.keep for c in plan.choices),
            "fits": plan.predicted_peak_bytes <= budget,
            "time_s": plan.predicted_time_s,
            "hash": plan.content_hash,
            "equal": train(model, optimizer, batch, None) == losses,
        }
    model, batch, _ = ZOO["gpt2"]()
    refused = _refusal(lambda: shard(model, batch, adamw(model), device_budget=low // 2, cache_dir=stores))
    return {"plans": plans, "refused": refused, "plain": type(model).__name__}


def another_batch(stores: Path) -> Any:
    """Rank 1 has a longer batch."""
    model, batch, _ = ZOO["gpt2"]()
    if dist.get_rank() == 1:
        batch = {name: torch.cat([t, t]) for name, t in batch.items()}
    return _refusal(lambda: shard(model, batch, adamw(model), device_budget="1GiB", cache_dir=stores))


def another_budget(stores: Path) -> Any:
    """Rank 1 is given another budget."""
    model, batch, _ = ZOO["gpt2"]()
    budget = f"{1 + dist.get_rank()}GiB"
    return _refusal(lambda: shard(model, batch, adamw(model), device_budget=budget, cache_dir=stores))


def one_fails(stores: Path) -> Any:
    """Rank 1, whose weights are others, cannot shard its last group; both go on with what they had."""
    model, batch, _ = ZOO["gpt2"]()
    other, _, _ = ZOO["gpt2"]()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.add_(1.0)
    optimizer = adamw(model)
    real = apply.fully_shard

    def failing(module: Any, **keywords: Any) -> Any:
        if dist.get_rank() == 1 and module is model:
            raise RuntimeError("no room")
        return real(module, **keywords)

    apply.fully_shard = failing  # type: ignore[assignment]
    try:
        said = _refusal(lambda: shard(model, batch, optimizer, device_budget="1GiB", cache_dir=stores))
    except RuntimeError as error:
        said = str(error)
    finally:
        apply.fully_shard = real
    return {"said": said, "equal": train(model, optimizer, batch, None) == train(other, adamw(other), batch, None)}


def other_weights(stores: Path) -> Any:
    """Rank 1 begins with other weights; it gets those of rank 0."""
    model, batch, _ = ZOO["gpt2"]()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    shard(model, batch, adamw(model), device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    expected, _, _ = ZOO["gpt2"]()
    return list(differences(_whole(model), _whole(expected)))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return content(model, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))


def late_weights(stores: Path) -> Any:
    """A model on the meta device is sharded before it has weights."""
    plain, batch, _ = ZOO["gpt2"]()
    with torch.device("meta"):
        model = type(plain)(plain.config).train()
    optimizer = adamw(model)
    shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    expected = train(DistributedDataParallel(plain), adamw(plain), batch, None)
    return train(model, optimizer, batch, None) == expected


def clipping(stores: Path) -> Any:
    """Returns the norm of DDP and the sharded one, of the same gradients."""
    norms = []
    for sharded in (False, True):
        model, batch, _ = ZOO["gpt2"]()
        if sharded:
            shard(model, batch, adamw(model), device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
        torch.manual_seed(5)
        called = model if sharded else DistributedDataParallel(model)
        called(**varied(batch, dist.get_rank())).loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append(float(norm.full_tensor() if sharded else norm))
    return norms


def accumulating(stores: Path) -> Any:
    """Two micro-batches an update: reduced together as under DDP's `no_sync`, and each by itself."""
    found = {}
    for kind in ("ddp", "together", "each"):
        model, batch, _ = ZOO["gpt2"]()
        optimizer: Any = adamw(model)
        called: Any = DistributedDataParallel(model)
        if kind != "ddp":
            model, batch, _ = ZOO["gpt2"]()
            optimizer = adamw(model)
            shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
            called = model
        torch.manual_seed(dist.get_rank())
        for i in range(6):
            last = i % 2 == 1
            if kind == "together":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with called.no_sync() if kind == "ddp" and not last else nullcontext():
                called(**varied(batch, 10 * i + dist.get_rank())).loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        found[kind] = content(model, optimizer)
    each = differences(found["each"], found["ddp"])
    return {"together": list(differences(found["together"], found["ddp"])), "each": max(each.values(), default=0.0)}


def saving(stores: Path) -> Any:
    """Saves in the middle with PyTorch's own checkpoints, and goes on from there as if nothing had been."""
    folder = stores / "checkpoint"
    model, batch, _ = ZOO["gpt2"]()
    optimizer = adamw(model)
    shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("mixed"), cache_dir=stores)
    train(model, optimizer, batch, None, 2)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    expected = train(model, optimizer, batch, None, 3)
    model, batch, _ = ZOO["gpt2"]()
    optimizer = adamw(model)
    shard(model, batch, optimizer, device_budget="1GiB", choices=state_of("device, reshard"), cache_dir=stores)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return train(model, optimizer, batch, None, 3) == expected


def collective(stores: Path) -> Any:
    """Gradients of one backward: against a reduction in plain PyTorch with the same layout, and against DDP."""
    ranks = dist.get_world_size()
    plain, batch, _ = ZOO["gpt2"]()
    for_ddp, _, _ = ZOO["gpt2"]()
    model, _, _ = ZOO["gpt2"]()
    shard(model, batch, adamw(model), device_budget="1GiB", choices=state_of("device, reshard"), cache_dir=stores)
    ddp = DistributedDataParallel(for_ddp)
    for called in (plain, ddp, model):
        torch.manual_seed(dist.get_rank())
        called(**varied(batch, dist.get_rank())).loss.backward()
    whole = {name: p.grad for name, p in plain.named_parameters()}
    wrong, largest = [], 0.0
    for module in model.modules():
        group: Any = fully_shard.state(module)._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        padded = []
        for held in group.fsdp_params:
            gradient: Any = whole[held._param_fqn]
            rows = -(-gradient.shape[0] // ranks) * ranks
            padded.append(torch.cat([gradient, gradient.new_zeros(rows - len(gradient), *gradient.shape[1:])]))
        given = torch.cat([p.view(ranks, -1) for p in padded], dim=1).flatten()
        expected = torch.empty(given.numel() // ranks)
        dist.reduce_scatter_tensor(expected, given, op=dist.ReduceOp.AVG)
        start = 0
        for held, gradient in zip(group.fsdp_params, padded, strict=True):
            found = held.sharded_param.grad.to_local().flatten()
            if not torch.equal(found, expected[start : start + found.numel()]):
                wrong.append(held._param_fqn)
            start += gradient.numel() // ranks
    for name, parameter in model.named_parameters():
        theirs: Any = for_ddp.get_parameter(name).grad
        ours: Any = parameter.grad
        scale = float(theirs.abs().max())
        largest = max(largest, float((ours.full_tensor() - theirs).abs().max()) / scale)
    return {"wrong": wrong, "largest": largest}


CASES: tuple[Case, ...] = (
    budgets, another_batch, another_budget, one_fails, other_weights, late_weights, clipping, accumulating, saving
)  # fmt: skip


def main(stores: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    for case in [c for c in (*CASES, collective) if c.__name__ in names] or CASES:
        say({"rank": dist.get_rank(), "case": case.__name__, "found": case(stores)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
