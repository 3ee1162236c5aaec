"""Train on ranks, save in the middle, and go on in other processes from what was saved.

`python -m tests.sharding.resuming MODE FOLDER BUDGET [CHECKPOINT [RECIPE]]` on each rank. With the mode `beside` plain
PyTorch goes on too, from the whole state that has been loaded.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stowage.flows import fit
from stowage.flows.api.saving import save_optimizer_for_torch
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import Infeasible, StowageError
from stowage.stages.runtime.sharding import writing
from tests.sharding.planned_beside_ddp import average, scattered_together
from tests.sharding.ranks import say
from tests.sharding.recipes import RECIPES, Recipe

BEFORE, AFTER = 3, 3
WHOLE = "1GiB"
TIGHT = "tight"
"""Budgets: everything in memory, or as little as there is a plan for, with a lower tier."""

NARROW, WIDE = 33, 769
"""Rows of the layers; odd, so that the last rank's shards are padded. The wide ones are worth offloading."""


class Odd(nn.Module):
    """Parameters that are cut in every way: rows that do not divide, one row, no dimension, another order, frozen."""

    def __init__(self, width: int = NARROW) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.deep = nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(width, width), nn.Tanh())])
        self.turned = nn.Parameter(torch.randn(width, 7).t())
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.base = nn.Linear(7, 7)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.deep(self.drop(self.norm(self.first(x)).relu()))
        hidden = self.base(torch.nn.functional.linear(hidden, self.turned)).tanh()
        return (self.last(hidden) * self.scale).square().mean()


def batch(rank: int, iteration: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * iteration + rank))}


def objective(model: nn.Module, given: Any) -> torch.Tensor:
    outputs = model(**given)
    loss: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    return loss


def recipe_of(name: str, width: int = NARROW) -> Recipe:
    """Return a recipe by its name; `Odd` without one."""
    if name:
        return RECIPES[name]()
    return Recipe(Odd(width), None, lambda number: batch(number % 100, number // 100))


class Training:
    """A model with its optimizer, schedule and step; `shift` makes its first weights others."""

    def __init__(
        self,
        stores: Path,
        budget: str,
        *,
        shift: float = 0.0,
        group: Any = None,
        name: str = "",
        width: int = NARROW,
        recipe: str = "",
    ) -> None:
        self.recipe = recipe_of(recipe, width)
        self.model = self.recipe.model
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(shift)
        self.optimizer = adamw(self.model)
        self.schedule = halving(self.optimizer)
        make = partial(
            fit,
            self.model,
            self.recipe.batch(0),
            self.optimizer,
            forward=objective,
            group=group,
            cache_dir=stores / f"stores{name}",
            quick=True,
        )
        if budget == TIGHT:
            make = partial(make, offload_dir=stores / f"lower tier{name}", method="offmate")
            try:
                make(device_budget=1)
            except Infeasible as error:
                budget = str(int(1.1 * error.smallest_feasible_bytes))
        self.step: TrainingStep = make(device_budget=budget)

    def train(self, rank: int, begin: int, end: int) -> list[float]:
        losses = []
        for i in range(begin, end):
            losses.append(self.step(self.recipe.batch(100 * i + rank)).item())
            with warnings.catch_warnings():  # the step calls the optimizer's own code, which schedules do not see
                warnings.simplefilter("ignore")
                self.schedule.step()
        return losses

    def save(self, path: Path) -> None:
        self.step.save(path, self.schedule)

    def load(self, path: Path) -> None:
        self.step.load(path, self.schedule)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return parameters, buffers and states, whole; all ranks call this."""
        contents = self.step.contents()
        contents.settle()
        named: dict[str, torch.Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        names = {id(p): n for n, p in self.model.named_parameters()}
        for parameter, states in self.optimizer.state.items():
            named |= {f"{names[id(parameter)]}::{k}": v for k, v in states.items() if isinstance(v, torch.Tensor)}
        found: dict[str, torch.Tensor] = {}
        for name in sorted(named):
            contents.lend(named[name], lambda held, name=name: found.update({name: held.clone().contiguous()}))  # type: ignore[misc]
        return found


def adamw(model: nn.Module) -> torch.optim.AdamW:
    first = [p for n, p in model.named_parameters() if n.startswith("first")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("first") and p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 3e-2}, {"params": rest, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def restored(whole: Mapping[str, torch.Tensor], recipe: Recipe) -> tuple[torch.optim.AdamW, Any]:
    """Load what a run had, whole, into a plain model; return its optimizer and its schedule."""
    model = recipe.model
    optimizer = adamw(model)
    schedule = halving(optimizer)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in whole:  # not what is no part of the state
                tensor.copy_(whole[name])
    for name, parameter in model.named_parameters():
        states = {key.partition("::")[2]: t.clone() for key, t in whole.items() if key.startswith(f"{name}::")}
        if states:
            optimizer.state[parameter] = states
    for _ in range(BEFORE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step()
    return optimizer, schedule


def contents_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and states of a plain model."""
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        named |= {f"{name}::{key}": state for key, state in optimizer.state.get(parameter, {}).items()}
    return {name: tensor.detach() for name, tensor in named.items()}


def go_on_plainly(
    whole: Mapping[str, torch.Tensor], recipe: Recipe, together: Sequence[Sequence[str]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on with plain PyTorch on this rank, from a whole state, and return losses and what there is at the end.

    Two ranks are DistributedDataParallel's. More add in another order than that does, so that there the collectives of
    a plan, which averages the gradients `together`, run on whole gradients.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    optimizer, schedule = restored(whole, recipe)
    model = recipe.model
    named = dict(model.named_parameters())
    called = DistributedDataParallel(model) if count == 2 else model
    losses = []
    for i in range(BEFORE, BEFORE + AFTER):
        optimizer.zero_grad()
        for buffer in model.buffers() if called is model else ():
            dist.broadcast(buffer, 0)
        loss = objective(called, recipe.batch(100 * i + rank))
        loss.backward()  # type: ignore[no-untyped-call]
        for names in together if called is model else ():
            average({name: named[name] for name in names}, count)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, contents_of(model, optimizer)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def refusals(run: Training, folder: Path) -> list[str]:
    """Return what ranks are told that read or save what they cannot."""
    rank = dist.get_rank()

    def sentence(work: Any) -> str:
        try:
            work()
        except StowageError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    (folder / "a file").write_text("")
    damaged = folder / "damaged"
    run.save(damaged)
    if rank == 0:
        (shard,) = damaged.glob("rank-00001-*")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(bytes(content))
    killed = folder / "killed"  # over the first checkpoint, before its index was there
    if rank == 0:
        killed.mkdir()
        shutil.copy(next(damaged.glob("rank-00000-*")), killed)
    dist.barrier()

    def full(*_: Any) -> str:
        raise StowageError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(writing, "write_tensors", full)
        half_written = sentence(lambda: run.save(folder / "checkpoint"))
    run.load(folder / "checkpoint")  # what was there is whole
    return [
        half_written,
        sentence(run.model.state_dict),
        sentence(run.optimizer.state_dict),
        sentence(lambda: run.save(folder / f"place {rank}")),
        sentence(lambda: run.save(folder / "a file")),
        sentence(lambda: run.load(folder / "nothing")),
        sentence(lambda: run.load(killed)),
        sentence(lambda: run.load(damaged)),
    ]


def main(mode: str, folder: Path, budget: str, checkpoint: str = "", recipe: str = "") -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    run = Training(
        folder,
        budget,
        shift=1.0 if checkpoint else 0.0,
        group=dist.group.WORLD,
        name=str(rank),
        width=WIDE if budget == TIGHT else NARROW,
        recipe=recipe,
    )
    torch.manual_seed(7 + rank)
    found: dict[str, Any] = {"slots": len(run.step.planned.slots)}
    if checkpoint:
        run.load(folder / checkpoint)
        found["loaded"] = digest(run.whole())
    else:
        found["before"] = run.train(rank, 0, BEFORE)
        generator = torch.get_rng_state()
        run.save(folder / "checkpoint")
        run.step.save_model(folder / "weights.safetensors")
        run.step.save_optimizer(folder / "optimizer.safetensors")
        save_optimizer_for_torch(folder / "optimizer.pt", run.step.contents())
        whole = run.whole()
        if rank == 0:
            save_file({**whole, "generator": generator}, folder / "whole.safetensors")
        found["saved"] = digest(whole)
    if mode == "refuse":
        found["refused"] = refusals(run, folder)
    whole, generator = run.whole(), torch.get_rng_state()
    found["after"] = run.train(rank, BEFORE, BEFORE + AFTER)
    end = run.whole()
    found["end"] = digest(end)
    if mode == "beside":
        plain = recipe_of(recipe)  # draws its first weights
        torch.set_rng_state(generator)
        losses, expected = go_on_plainly(whole, plain, scattered_together(run.step))
        found["wrong"] = [f"loss {i}" for i, (a, b) in enumerate(zip(found["after"], losses, strict=True)) if a != b]
        found["wrong"] += [name for name, tensor in end.items() if not torch.equal(tensor, expected[name])]
    say(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
