"""`curve`: predicted step time against budget for a model object in a script, before one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.best_batch import without_meta
from stowage.flows.api.choices import print_notice
from stowage.flows.api.fit import MakeOptimizer
from stowage.flows.api.lower_tier import lower_tier
from stowage.flows.api.offload import Offload, offload_of
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.curve import POINTS, Curve, CurvePlanner, CurvePoint
from stowage.flows.planning.step import QUICK, Effort, home_folder, target_device
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.solve import check_method
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import MicroBatch, record_step
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective


def curve(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    budgets: int | Sequence[str | int] = POINTS,
    loss: Loss | None = None,
    forward: Objective | None = None,
    max_grad_norm: float | None = None,
    method: str = "auto",
    offload: Offload | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    costs: str = "measured",
    said: Callable[[CurvePoint], None] = lambda point: None,
    say: Callable[[str], None] = print_notice,
) -> Curve:
    """Predict step time, and what moves, against budget: from keeping everything to the least memory.

    The step is traced and profiled once, and each budget is planned as `fit` would plan it. Nothing is trained.

    Args:
        model, optimizer, loss, forward, max_grad_norm, method, offload, host_budget, disk_budget, offload_dir,
            cache_dir, quick, say: see `fit`. The model may be on the meta device; weights are not needed.
        batch: a sample.
        budgets: how many, evenly spaced, or which: sizes, or percentages of plain PyTorch's predicted peak.
        costs: `measured`, or `roofline` estimates from the device's rates.
        said: told of each point as it is found.

    Returns:
        The curve: print it, or `write` it as Parquet and PNG.

    Raises:
        TraceError: the model cannot be traced; the text names the module and the line.
        ParameterError: an argument is wrong.
    """
    check_method(method)
    model, layouts = without_meta(model, batch, optimizer)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()))
    home, effort = home_folder(cache_dir), QUICK if quick else Effort()
    target = target_device(next((p.device for p in model.parameters()), torch.device("cpu")), home)
    lower = lower_tier(target, offload_of(offload, offload_dir, host_budget, disk_budget), method=method)
    notices: list[str] = []
    updates = MicroBatch(max_grad_norm=max_grad_norm if optimizer is not None else None)

    def costed() -> Costed:
        recorded = record_step(model, batch, loss=loss, objective=forward, layouts=layouts)
        notices.extend(n for n in recorded.notices if n not in notices)
        with without_autocast():
            return cost_step(
                model,
                batch,
                loss=loss,
                objective=forward,
                optimizer=optimizer,
                home=home,
                recorded=recorded,
                micro_batch=updates,
                costs=costs,
                effort=effort,
                notices=notices,
                target=target,
            )

    with forked_generators():
        found = with_true_kernels(costed)
    for notice in notices:
        say(notice)
    planner = CurvePlanner(found, method=method, home=home, effort=effort, below=lower.below if lower else None)
    return planner.curve(budgets, said)
