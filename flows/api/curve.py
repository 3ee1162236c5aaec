"""`curve`: predicted step time against budget for a model object in a script, before a budget or a card is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows.api.best_batch import without_meta
from stowage.flows.api.choices import print_notice
from stowage.flows.api.fit import MakeOptimizer
from stowage.flows.api.lower_tier import lower_tier_for
from stowage.flows.api.offload import Offload, offload_of
from stowage.flows.planning.costed import Costed, cost_step
from stowage.flows.planning.curve import POINTS, CurvePlanner
from stowage.flows.planning.curve_card import SEARCHES, Growth, answer_of, host_as_lower_tier
from stowage.flows.planning.curve_result import CardAnswer, Curve
from stowage.flows.planning.effort import QUICK, Effort, stores_folder, target_device
from stowage.flows.planning.job import Planning, StepToPlan
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.device.cards import Card, card_named, read_card
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.solve import LowerTier, check_method
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import MicroBatch, record_step
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective
from stowage.stages.workload.resize import resized, samples_of


def curve(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    budgets: int | Sequence[str | int] = POINTS,
    device: str | Path | None = None,
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
    """Predict step time and transfers against budget, from keeping everything to the least memory.

    The step is traced and profiled once, and each budget is planned as `fit` would plan it. Nothing is trained.

    Args:
        model: see `fit`. It may be on the meta device; weights are not needed.
        optimizer: see `fit`.
        loss: see `fit`.
        forward: see `fit`.
        max_grad_norm: see `fit`.
        method: see `fit`.
        offload: see `fit`.
        host_budget: see `fit`.
        disk_budget: see `fit`.
        offload_dir: see `fit`.
        cache_dir: see `fit`.
        quick: see `fit`.
        say: see `fit`.
        batch: an example of a batch.
        budgets: how many, or which: sizes, or percentages of plain PyTorch's predicted peak.
        device: a card that need not be here: the name of a well-known one, `rtx-4090`, or a JSON file that describes
            one. Times are then estimates from its rates. With `host_budget` the plans use so much pinned RAM; without,
            only if nothing else fits.
        costs: `measured`, or `roofline` estimates from the device's rates.
        said: called with each point as it is found.

    Returns:
        The curve: print it, or `write` it as Parquet and PNG.

    Raises:
        TraceError: the model cannot be traced; the text names the module and the line.
        ParameterError: an argument is wrong.
        Infeasible: no budget has a plan.
    """
    check_method(method)
    card = card_of(device) if device is not None else None
    model, layouts = without_meta(model, batch, optimizer)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()))
    stores = stores_folder(cache_dir)
    if card is not None:
        target = card.described(dtype_of(model))
    else:
        target = target_device(next((p.device for p in model.parameters()), torch.device("cpu")), stores)
    step = StepToPlan(
        model=model,
        loss=loss,
        optimizer=optimizer,
        objective=forward,
        layouts=layouts,
        micro_batch=MicroBatch(max_grad_norm=max_grad_norm if optimizer is not None else None),
    )
    how = Planning(
        stores=stores,
        effort=effort_for(QUICK if quick else Effort(), card),
        costs="roofline" if card is not None else costs,
        target=target,
        method=method,
    )
    subject = Subject(step, how)
    lower = lower_tier_for(target, offload_of(offload, offload_dir, host_budget, disk_budget), method=method)
    found = subject.curve(batch, budgets, lower.lower_tier if lower else None, card, said)
    for notice in how.notices:
        say(notice)
    return found


@dataclass(frozen=True)
class Subject:
    """Holds what is planned, without the batch and the budget.

    Attributes:
        step: the step, without its batch.
        how: with which method and effort; its target is known.
    """

    step: StepToPlan
    how: Planning

    def curve(
        self,
        batch: Any,
        budgets: int | Sequence[str | int],
        lower_tier: LowerTier | None,
        card: Card | None = None,
        said: Callable[[CurvePoint], None] = lambda point: None,
        answered: Callable[[CardAnswer], None] = lambda answer: None,
    ) -> Curve:
        """Plan the curve of the step on a batch.

        Args:
            batch: an example of a batch.
            budgets: see `curve`.
            said: see `curve`.
            lower_tier: the lower tier, if plans may use one.
            card: the target's description, if it is not here.
            answered: called with the answer for that card, before the curve is planned; plans for other budgets may
                make a faster one known.
        """
        costed = self.costed(batch)
        if card is None:
            return self.planner(costed, lower_tier).curve(budgets, said)
        in_card = self.planner(costed, None)
        with_ram = cache(lambda: self.planner(costed, lower_tier or host_as_lower_tier(costed.target)))
        dtype, growth = dtype_of(self.step.model), self.growth(batch)

        def answer() -> tuple[CardAnswer, CurvePlanner]:
            return answer_of(card, dtype, in_card, with_ram, growth)

        first, chosen = answer()
        answered(first)
        planner = chosen if lower_tier is None else with_ram()
        return planner.curve(budgets, said, lambda: answer()[0], first.budget_bytes)

    def costed(self, batch: Any) -> Costed:
        """Trace, profile and cut the step on a batch."""
        step, notices = self.step, self.how.notices

        def cost() -> Costed:
            recorded = record_step(
                step.model,
                batch,
                loss=step.loss,
                objective=step.objective,
                layouts=step.layouts,
                freezes=self.how.freeze is not None,
            )
            notices.extend(n for n in recorded.notices if n not in notices)
            with without_autocast():
                return cost_step(replace(step, batch=batch, recorded=recorded), self.how)

        with forked_generators():
            return with_true_kernels(cost)

    def planner(self, costed: Costed, lower_tier: LowerTier | None) -> CurvePlanner:
        """Return the planner of the step with a lower tier, or without."""
        return CurvePlanner(costed, replace(self.how, lower_tier=lower_tier))

    def growth(self, batch: Any) -> Growth | StowageError:
        """Find how plain PyTorch's memory grows with the batch; or return why that is not known."""
        try:
            samples = samples_of(batch)
            return Growth(samples, self.costed(resized(batch, 2 * samples)).eager_peak_bytes)
        except StowageError as error:
            return error


def card_of(device: str | Path) -> Card:
    """Find a card by its name, or read it from a JSON file.

    Raises:
        ParameterError: there is no such card, or the file describes none.
    """
    if isinstance(device, Path) or device.endswith(".json"):
        return read_card(Path(device))
    if not isinstance(device, str):
        raise ParameterError(f"device is {device!r}: name a card such as 'rtx-4090', or a JSON file.")
    return card_named(device)


def effort_for(effort: Effort, card: Card | None) -> Effort:
    """Return the effort of planning, which is less for a card that is only described."""
    return effort if card is None else replace(effort, o_ilp_searches=SEARCHES)


def dtype_of(model: nn.Module) -> str:
    """Return the type of most matrix products: autocast's where that is on, else that of most parameters."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    count: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        count[name] = count.get(name, 0) + parameter.numel()
    return max(count, key=count.__getitem__, default="float32")
