"""Plans a training step within a memory budget, for a model object in any script: `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.arguments import check_arguments, check_at_hand, check_objective
from stowage.flows.api.binding import ExecutionChoice
from stowage.flows.api.budget import RunBudget, free_for
from stowage.flows.api.check.when import check_of
from stowage.flows.api.choices import Choices, print_notice
from stowage.flows.api.freeze import Freeze, freeze_of, freezing_of
from stowage.flows.api.frozen_steps import FrozenSteps
from stowage.flows.api.late_weights import LateWeights
from stowage.flows.api.lower_tier import lower_tier_for
from stowage.flows.api.offload import Offload, offload_of
from stowage.flows.api.planner import Planner
from stowage.flows.api.several_ranks import run_together
from stowage.flows.api.steps import MOST, NewShapes, Say, Steps
from stowage.flows.api.training_step import TrainingStep
from stowage.flows.api.update_rate import with_own_updates, with_shares_of_ranks
from stowage.flows.planning.effort import QUICK, Effort, stores_folder, target_device
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.lossy import Lossy
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.runtime.executors.base import MakeExecutor
from stowage.stages.runtime.executors.sharded import ShardedDevice
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.sharding.agreement import heard
from stowage.stages.runtime.sharding.ranks import Ranks, ranks_of
from stowage.stages.runtime.sharding.sharding import Sharding
from stowage.stages.trace.checks import check_module, check_parameters
from stowage.stages.workload.calls import Loss, Objective
from stowage.stages.workload.guard import user_code

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    steps: Steps,
    choices: Choices,
    late: LateWeights | None = None,
) -> TrainingStep:
    """Make a training step that has planned nothing yet.

    Args:
        model: see `fit`.
        optimizer: see `fit`.
        steps: what every program of the model shares.
        choices: budgets, and settings to plan, check and execute.
        late: weights that are still in files.

    Raises:
        ParameterError: an argument is wrong.
    """
    ranks = ranks_of(choices.group)
    with heard(ranks):
        return _make_step(model, optimizer, steps, choices, late, ranks)


def _make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    steps: Steps,
    choices: Choices,
    late: LateWeights | None,
    ranks: Ranks | None,
) -> TrainingStep:
    check_arguments(model=model, loss=steps.loss, objective=steps.objective, accumulate=steps.accumulate)
    limit = _clipping(steps.max_grad_norm, optimizer)
    check_module(model)
    check_parameters(model)
    offload, stores = choices.offload, stores_folder(choices.cache_dir)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    target = target_device(device, stores)
    if ranks is None:
        target = with_own_updates(target, optimizer if offload.host is not None else None, device, stores)
    lower = lower_tier_for(target, offload, device=device, method=choices.method)
    known = KnownOptimizer(optimizer) if optimizer is not None else None
    freezing = freezing_of(choices.freeze, optimizer, choices.say)
    if ranks is not None:
        notice = run_together(ranks, model, optimizer, _settings(steps, choices))
        if notice:
            choices.say(notice)
        if offload.host is not None or offload.dir is not None:
            target = with_shares_of_ranks(
                target,
                optimizer,
                device,
                stores,
                ranks,
                host=offload.host is not None,
                disk=offload.dir is not None,
            )
            lower = lower_tier_for(target, offload, device=device, method=choices.method)
    planner = Planner(
        model,
        known,
        RunBudget(choices.device_budget, lambda: free_for(model, optimizer, device, ranks)),
        method=choices.method,
        stores=stores,
        effort=QUICK if choices.quick else Effort(),
        lower_tier=replace(lower.lower_tier, gradients=optimizer is not None and ranks is None) if lower else None,
        structures=choices.programs,
        ranks=ranks,
        freeze=freezing,
        lossy=choices.lossy,
    )
    executor = choices.executor
    if ranks is not None:
        executor = partial(ShardedDevice, sharding=Sharding(model, optimizer, ranks))
    return TrainingStep(
        model,
        optimizer,
        planner,
        replace(
            steps,
            max_grad_norm=limit,
            known_optimizer=known,
            most=choices.programs,
            new_shapes=choices.new_shapes,
            ranks=ranks.count if ranks is not None else 1,
            units=freezing.kind if freezing is not None else None,
        ),
        execution=ExecutionChoice(executor, lower.open if lower else None, late),
        check=choices.check,
        say=choices.say,
        frozen=FrozenSteps(choices.freeze, freezing, ranks) if choices.freeze is not None and freezing else None,
    )


def _settings(steps: Steps, choices: Choices) -> dict[str, Any]:
    """Return what plans depend on besides model, batch and optimizer, by its name in `fit`."""
    return {
        "device_budget": choices.device_budget,
        "accumulate": steps.accumulate,
        "max_grad_norm": steps.max_grad_norm,
        "method": choices.method,
        "quick": choices.quick,
        "check": choices.check,
        "new_shapes": choices.new_shapes,
        "programs": choices.programs,
        "lossy": choices.lossy,
        "freeze": choices.freeze.text() if choices.freeze is not None else None,
        "host_budget": choices.offload.host,
        "disk_budget": choices.offload.disk,
        "offload_dir": "a folder of its own" if choices.offload.dir is not None else None,
    }


def _clipping(max_grad_norm: float | None, optimizer: torch.optim.Optimizer | None) -> float | None:
    if max_grad_norm is None:
        return None
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0:
        raise ParameterError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None to clip nothing.")
    if optimizer is None:
        raise ParameterError("max_grad_norm clips before updates, but there is no optimizer: pass one to fit.")
    return float(max_grad_norm)


def fit(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    device_budget: str | int,
    loss: Loss | None = None,
    forward: Objective | None = None,
    forms: Iterable[Any] = (),
    resize: Callable[[Any, Any], Any] | None = None,
    new_shapes: NewShapes = "plan",
    programs: int = MOST,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    method: str = "auto",
    offload: Offload | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    weights: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    check: str = "powers",
    executor: MakeExecutor = SingleDevice,
    group: Any = None,
    freeze: Freeze | None = None,
    lossy: Lossy | None = None,
    say: Say = print_notice,
) -> TrainingStep:
    """Plan the training step of `model` on batches like `batch` within `device_budget`.

    Args:
        model: any `nn.Module`, in the mode it trains in; one built under `torch.device("meta")` gets its `weights`.
            Parameters that do not require gradients stay as they are.
        batch: a sample: a mapping is passed as keywords, a tuple or list as positions, anything else as one argument.
        optimizer: an optimizer of the model's parameters, with groups as you like, or a function that makes one from
            them; None leaves gradients in `.grad`.
        device_budget: device bytes of the whole iteration (parameters, gradients, optimizer states, activations,
            buffers, inputs, workspace): `900MiB`, `1.5GiB`, bytes, or `50%` of the predicted peak of plain PyTorch on
            the largest batch that was given or seen: it grows when a larger one comes. `auto` is what is free on the
            device, or in RAM within the limits of control groups, less a reserve that the plan states; ranks that share
            a memory divide it. `smallest` is
            the least memory for which there is a plan, `+5%` the least with which a step takes at most 5% longer than
            with everything kept; both are searched for on the first batch, and grow too.
        loss: `loss(outputs, batch)`; by default `outputs.loss`. With accumulation divide it yourself, as in plain
            PyTorch.
        forward: `forward(model, batch)` calls the model itself and returns the loss, instead of `loss`: for batches of
            `(x, y)` it is `lambda model, batch: criterion(model(batch[0]), batch[1])`.
        forms: more batches, of other shapes, to plan for now; the largest first. With `resize`, whatever it takes:
            `forms=range(16, 129, 16), resize=lambda batch, length: {k: v[:, :length] for k, v in batch.items()}`.
        resize: `resize(batch, form)` makes a batch of another form from `batch`.
        new_shapes: a batch of a shape that is new trains at once where it fits with everything kept, and else is
            planned from what is known of other shapes. Where nothing is, `plan` measures and searches like here,
            `quick` for seconds only; `error` refuses every shape that was not given here.
        programs: how many are kept in memory, the latest; plans stay in the store.
        accumulate: micro-batches of one update, so that all of them are planned now. Call the step with
            `update=False` for all but the last.
        max_grad_norm: clip gradients by their global norm, as `torch.nn.utils.clip_grad_norm_` does; `grad_norm` has
            the norm. `inf` computes it and clips nothing.
        method: `auto` picks; `rockmate` chains schedules of blocks by RK-Rotor; `hiremate` plans the step by clusters;
            `offmate` forces offloading.
        offload: where what does not fit `device_budget` may live: `Offload("/fast/disk", disk="100GiB")`; on a machine
            with a GPU `Offload("/fast/disk", host="8GiB")`, see `Offload`.
        offload_dir: `Offload.dir` as an argument of its own, instead of `offload`.
        host_budget: `Offload.host` as an argument of its own.
        disk_budget: `Offload.disk` as an argument of its own.
        weights: a safetensors file, or a folder of them, for a model on the meta device: each tensor is read straight
            into the tier where it lives, so that the model may be larger than RAM.
        cache_dir: where costs, options and plans are kept; default `STOWAGE_HOME` or the user's cache folder.
        quick: plan in seconds instead of a minute or so, less well: fewer samples of each operation, fewer schedules.
        check: when model and loss also run in plain PyTorch, forward only and within the budget, so that a plan which
            has become stale raises `StaleStep`: `powers` on calls 1, 2, 4, 8, … of each program, `always`, `never`;
            `gradients` like `powers`, and on the first call everything is compared that the step computes.
        executor: how plans are executed: a class like `SingleDevice`, which takes one device; see `Executor`.
        group: the process group (`torch.distributed.group.WORLD`) whose ranks train this model together, each on
            batches of its own: each keeps a shard of every parameter and its states, and gradients are averaged.
        freeze: train a part of the model in each step: `Freeze(rate=0.9, policy="ils")` freezes nine tenths of its
            units, those that moved least. Memory is planned for the worst choice of what trains; frozen parameters and
            their states stay as they are.
        lossy: leave to keep values for backward in fewer bits, which changes gradients: `Lossy(["int8", "bf16"],
            max_gradient_error=0.01)`, see `Lossy`. Without it every number is that of plain PyTorch.
        say: receives notices, one sentence each.

    Under `torch.autocast` the forward and the loss run with its casts; call the step under it too.

    Raises:
        Infeasible: the budget cannot be met; it states the smallest feasible one.
        TraceError: the model cannot be traced; the text names the module and the line.
        ParameterError: an argument is wrong.
    """
    with heard(ranks_of(group)):
        check_arguments(model=model, optimizer=optimizer, forward=forward, forms=forms, resize=resize, weights=weights)
        choices = Choices(
            device_budget,
            method,
            offload_of(offload, offload_dir, host_budget, disk_budget),
            cache_dir,
            quick,
            check_of(check),
            new_shapes,
            programs,
            executor,
            say,
            group,
            freeze_of(freeze),
            lossy,
        )
        check_objective(loss, forward)
        check_at_hand(model)
        if isinstance(optimizer, torch.optim.Optimizer) and any(p.is_meta for p in model.parameters()):
            raise ParameterError(
                "Parameters on the meta device are replaced when their weights are loaded: pass a function that makes "
                "the optimizer, not a ready one."
            )
        if lossy is not None and any(p.is_meta for p in model.parameters()):
            raise ParameterError(
                "lossy is measured on the model's weights, and on the meta device there are none: load them before "
                "fit, or leave lossy out."
            )
        late = LateWeights(model, batch, weights)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            with user_code(
                f"The function {getattr(optimizer, '__name__', type(optimizer).__name__)!r} for the optimizer"
            ):
                optimizer = optimizer(list(model.parameters()))
        if optimizer is not None:
            _check_holds(optimizer, model)
        step = make_step(model, optimizer, Steps(loss, forward, accumulate, max_grad_norm), choices, late)
        if not model.training:
            say(
                "The model is in evaluation mode (model.training is False): this step trains without dropout and with "
                "the running statistics of batch normalisation; call model.train() before fit for the usual."
            )
        others = [resize(batch, form) for form in forms] if resize is not None else list(forms)
        try:
            if others:
                step.programs.find_ahead([batch, *others])
            step.prepare_cycle(batch)
        except StowageError:  # all ranks have it
            step.programs.binding.undo()
            raise
        return step


def _check_holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ParameterError(
            f"optimizer gives a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a function that makes one "
            "from parameters."
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ParameterError(
            f"The optimizer {type(optimizer).__name__} holds none of the model's parameters: make it from these."
        )
