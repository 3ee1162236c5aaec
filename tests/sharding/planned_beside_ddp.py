"""Trains a recipe under a plan of several ranks, and under DistributedDataParallel, and compares the bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.collectives import GATHER, SCATTER, ShardForm, scattered
from stowage.stages.runtime.offload.contents import Contents
from tests.sharding.recipes import OPTIMIZERS, RECIPES, Recipe

ITERATIONS = 5
NORM = [0.0]
"""The latest global norm beside the plan."""

Clip = Callable[[Iterable[torch.Tensor], float], torch.Tensor]


@dataclass
class Compared:
    """What one rank found.

    Attributes:
        differences: what is not bit for bit equal; empty where all is.
        losses: of all micro-batches.
        method: of the plan.
        gathers, parameters: rows of the plan that gather, and parameters: more of the first regather.
        recomputes, offloads: rows that compute again, and that offload.
        predicted_bytes, peak_bytes, budget_bytes: of one iteration more, which is measured.
        norms: the global norm of the last update's gradients under the plan, and beside it.
        largest: the greatest relative difference of each parameter's norm, where bits differ.
        besides: the same of each loss, state and buffer.
    """

    differences: list[str]
    losses: list[float]
    method: str = ""
    gathers: int = 0
    recomputes: int = 0
    offloads: int = 0
    distinct: int = 0
    predicted_bytes: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0
    norms: tuple[float, float] = (0.0, 0.0)
    largest: dict[str, float] = field(default_factory=dict)
    besides: dict[str, float] = field(default_factory=dict)


def loss_of(recipe: Recipe, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss as plain PyTorch computes it."""
    outputs = model(**batch)
    found: torch.Tensor = outputs.loss if recipe.loss is None else recipe.loss(outputs, batch)
    return found


def numbers(iteration: int, part: int) -> int:
    """Return the number of this rank's batch."""
    return 1000 * iteration + 100 * part + dist.get_rank()


def train_ddp(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    ddp: nn.Module,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    iterations: int = ITERATIONS,
    clip: Clip = nn.utils.clip_grad_norm_,
) -> Iterator[float]:
    """Train, and yield the losses; `clip` clips gradients in place, and returns their norm."""
    for iteration in range(iterations):
        for part in range(accumulate):
            last = part == accumulate - 1
            waits: Any = nullcontext() if last else ddp.no_sync()  # type: ignore[operator]
            with waits:
                loss = loss_of(recipe, ddp, recipe.batch(numbers(iteration, part)))
                loss.backward()  # type: ignore[no-untyped-call]
            yield loss.item()
        if max_grad_norm is not None:
            NORM[0] = float(clip(ddp.parameters(), max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()


def train_by_collectives(
    recipe: Recipe,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    iterations: int = ITERATIONS,
    together: Sequence[Sequence[str]] = (),
) -> Iterator[float]:
    """Train whole parameters, whose gradients are averaged by the collectives of a plan, and yield the losses.

    Each rank's part of gradients, padded as shards are, is divided, then summed up on that rank, then sent to all. In
    which order summands are added depends on where in a collective an element is, so those of the plan are given.
    """
    count = dist.get_world_size()
    for iteration in range(iterations):
        for part in range(accumulate):
            for buffer in model.buffers() if part == 0 else ():
                dist.broadcast(buffer, 0)
            loss = loss_of(recipe, model, recipe.batch(numbers(iteration, part)))
            loss.backward()  # type: ignore[no-untyped-call]
            yield loss.item()
        assert max_grad_norm is None
        named = dict(model.named_parameters())
        for names in together:
            average({name: named[name] for name in names}, count)
        optimizer.step()
        optimizer.zero_grad()


def average(parameters: Mapping[str, torch.Tensor], count: int) -> None:
    """Average the gradients of some parameters in one buffer, which has all parts of one rank after the other."""
    forms = [ShardForm.of(p.shape, p.stride(), count) for p in parameters.values()]
    wholes = []
    for parameter, form in zip(parameters.values(), forms, strict=True):
        assert form is not None
        gradient = torch.empty_like(parameter).copy_(parameter.grad)  # type: ignore[arg-type]
        flat = gradient.as_strided((form.elements,), (1,)) * (1.0 / count)  # as DistributedDataParallel divides
        wholes.append(torch.cat([flat, flat.new_zeros(form.padded_elements - form.elements)]).view(count, -1))
    buffer = torch.cat(wholes, dim=1)
    for rank, own in enumerate(buffer):
        dist.reduce(own, rank)
        dist.broadcast(own, rank)
    parts = buffer.split([whole.shape[1] for whole in wholes], dim=1)
    for parameter, form, part in zip(parameters.values(), forms, parts, strict=True):
        assert form is not None
        gradient = torch.empty_like(parameter)
        gradient.as_strided((form.elements,), (1,)).copy_(part.reshape(-1)[: form.elements])
        parameter.grad = gradient


def scattered_together(step: TrainingStep) -> list[list[str]]:
    """Return the parameters whose gradients the plan scatters together."""
    return [list(scattered(call.arguments)) for call in step.planned.trace.calls if call.target == SCATTER]


def train_planned(
    recipe: Recipe, step: TrainingStep, *, accumulate: int = 1, iterations: int = ITERATIONS
) -> Iterator[float]:
    """Train, and yield the losses."""
    for iteration in range(iterations):
        for part in range(accumulate):
            batch = recipe.batch(numbers(iteration, part))
            yield step(batch, update=part == accumulate - 1).item()


def compare(
    name: str,
    optimizer: str,
    budget: str | int,
    stores: Path,
    *,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    offload: Path | None = None,
    iterations: int = ITERATIONS,
    reference: Callable[..., Iterator[float]] = train_ddp,
    wrap: Callable[[nn.Module], nn.Module] = nn.parallel.DistributedDataParallel,
    more: Mapping[str, Any] | None = None,
    look: Callable[[TrainingStep], None] = lambda step: None,
) -> Compared:
    """Train both on this rank, and compare what they give; `look` sees the step that has trained."""
    recipe = RECIPES[name]()
    rank = dist.get_rank()
    plain = copy.deepcopy(recipe.model)
    ddp = wrap(plain)
    beside = OPTIMIZERS[optimizer](plain.parameters())
    own = OPTIMIZERS[optimizer](recipe.model.parameters())
    step = fit(
        recipe.model,
        recipe.batch(rank),
        own,
        device_budget=budget,
        loss=recipe.loss,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        offload_dir=offload / str(rank) if offload is not None else None,
        cache_dir=stores,
        quick=True,
        group=dist.group.WORLD,
        **more or {},
    )
    torch.manual_seed(7 + rank)
    losses = list(train_planned(recipe, step, accumulate=accumulate, iterations=iterations))
    generator = torch.get_rng_state()
    torch.manual_seed(7 + rank)
    arguments: Any = {"accumulate": accumulate, "max_grad_norm": max_grad_norm, "iterations": iterations}
    if reference is train_by_collectives:
        arguments["together"] = scattered_together(step)
    expected = list(reference(recipe, beside, ddp, **arguments))
    differences = [f"loss {i}: {a!r}, not {b!r}" for i, (a, b) in enumerate(zip(losses, expected)) if a != b]
    if not torch.equal(generator, torch.get_rng_state()):
        differences.append("generator")
    found = Compared(differences, losses)
    found.besides = {f"loss {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(losses, expected)) if a != b}
    if step.grad_norm is not None:
        found.norms = float(step.grad_norm), NORM[0]
    _parameters(step, recipe.model, plain, found)
    _states(step, recipe.model, own, plain, beside, found)
    for (key, one), (_, other) in zip(recipe.model.named_buffers(), plain.named_buffers(), strict=True):
        if not torch.equal(one, other):
            differences.append(f"buffer {key}")
            found.besides[f"buffer {key}"] = _apart(one, other)
    look(step)
    rows = step.planned.rows
    measured = step.measure(recipe.batch(numbers(iterations, accumulate - 1)))
    computed = [r.node for r in rows if r.action == "compute"]
    calls = step.planned.trace.calls
    nodes = [n.node for n in step.planned.nodes if any(calls[c].target == GATHER for c in n.calls)]
    gathered = [r.node for r in rows if r.node in nodes]
    found.method = step.plan.method
    found.gathers, found.distinct = len(gathered), len(set(gathered))
    found.recomputes = len(computed) - len(set(computed))
    found.offloads = sum(r.action == "offload" for r in rows)
    found.predicted_bytes, found.peak_bytes = step.plan.device_peak_bytes, measured.peak_bytes
    found.budget_bytes = step.plan.device_budget_bytes
    return found


def _parameters(step: TrainingStep, model: nn.Module, plain: nn.Module, found: Compared) -> None:
    contents = step.contents()
    for (name, parameter), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        whole, expected = _lent(contents, parameter), other.detach()
        if not torch.equal(whole, expected):
            found.differences.append(f"parameter {name}")
            found.largest[name] = _apart(whole, expected)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far two tensors are apart, relative to the norm of what is expected."""
    return float((found - expected).double().norm() / expected.double().norm().clamp(min=1e-30))


def _states(
    step: TrainingStep,
    model: nn.Module,
    own: torch.optim.Optimizer,
    plain: nn.Module,
    beside: torch.optim.Optimizer,
    found: Compared,
) -> None:
    contents = step.contents()
    for (name, parameter), (_, like) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        have, expected = own.state.get(parameter, {}), beside.state.get(like, {})
        if have.keys() != expected.keys():
            found.differences.append(f"states of {name}: {sorted(have)}, not {sorted(expected)}")
            continue
        for key, state in have.items():
            if not isinstance(state, torch.Tensor):
                if state != expected[key]:
                    found.differences.append(f"state {key} of {name}")
                continue
            whole = _lent(contents, state)
            if not torch.equal(whole, expected[key]):
                found.differences.append(f"state {key} of {name}")
                found.besides[f"state {key} of {name}"] = _apart(whole, expected[key])


def _lent(contents: Contents, tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole content of a parameter or state."""
    seen: list[torch.Tensor] = []
    contents.lend(tensor, lambda content: seen.append(content.clone()))
    return seen[0]
