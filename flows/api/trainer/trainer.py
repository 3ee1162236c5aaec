"""Plans a Hugging Face Trainer's training steps within a memory budget, with the same numbers: `stow`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.flows.api.check.when import check_of
from stowage.flows.api.choices import Choices, print_notice
from stowage.flows.api.fit import make_step
from stowage.flows.api.freeze import Freeze, freeze_of
from stowage.flows.api.offload import Offload, offload_of
from stowage.flows.api.steps import MOST, NewShapes, Say, Steps
from stowage.flows.api.trainer.answers import Answers
from stowage.flows.api.trainer.batches import AsStepped, first_evaluations
from stowage.flows.api.trainer.files import TrainerFiles, replaced
from stowage.flows.api.trainer.ranks import group_of, leave_unwrapped, require_unwrapped
from stowage.flows.api.trainer.refusals import refuse
from stowage.flows.api.trainer.resuming import plain
from stowage.flows.api.training_step import TrainingStep
from stowage.stages.ir.errors import MIB, NO_PLAN, ParameterError, TraceError
from stowage.stages.ir.lossy import Lossy
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.runtime.executors.base import MakeExecutor
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.structure import copied

AnyTrainer = TypeVar("AnyTrainer")


def stow(
    trainer: AnyTrainer,
    *,
    device_budget: str | int,
    method: str = "auto",
    offload: Offload | None = None,
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    check: str = "powers",
    new_shapes: NewShapes = "plan",
    programs: int = MOST,
    executor: MakeExecutor = SingleDevice,
    freeze: Freeze | None = None,
    lossy: Lossy | None = None,
    say: Say = print_notice,
) -> AnyTrainer:
    """Let `trainer.train()` run every training step under a plan within `device_budget`.

    The script stays as it is: logging, evaluation, saving, resuming, schedules and callbacks work as before, and
    losses, `grad_norm` and weights are those of the plain Trainer bit for bit. A batch of another shape (a partial last
    one, another padded length) is planned when it first appears.

    Forward, backward, clipping and updates happen inside the training step; when the Trainer then calls
    `clip_grad_norm_`, `optimizer.step()` and `zero_grad()`, no gradients are left to work on. So callbacks see none
    either. Evaluation runs under a forward-only plan within the same budget, once training has begun; what the Trainer
    gathers of it, such as the logits of a whole data set, comes besides. Saving and loading go tensor by tensor. While
    weights are offloaded, `with trainer.on_device() as model:` gives the model with all of them.

    Args:
        trainer: a `transformers.Trainer`, or one of a subclass; its own `compute_loss` and `training_step` are traced.
        device_budget: as in `fit`.
        method: as in `fit`.
        offload: as in `fit`.
        host_budget: as in `fit`.
        disk_budget: as in `fit`.
        offload_dir: as in `fit`.
        cache_dir: as in `fit`.
        quick: as in `fit`.
        check: as in `fit`.
        new_shapes: as in `fit`.
        programs: as in `fit`.
        executor: as in `fit`.
        freeze: as in `fit`; the Trainer's checkpoints hold what has been chosen so far.
        lossy: as in `fit`; gradients are then not the plain Trainer's.
        say: as in `fit`.

    Returns:
        the same trainer; `trainer.stowage` has its `plan`, and its `step`.

    Raises:
        ParameterError: this trainer cannot be planned for; the text says why.
    """
    if not callable(getattr(trainer, "training_step", None)) or not hasattr(trainer, "accelerator"):
        raise ParameterError(f"stow takes a transformers.Trainer, but this is a {type(trainer).__name__}.")
    offload = offload_of(offload, offload_dir, host_budget, disk_budget)
    refuse(trainer, offloads=offload.anywhere)
    choices = Choices(
        device_budget,
        method,
        offload,
        cache_dir,
        quick,
        check_of(check),
        new_shapes,
        programs,
        executor,
        say,
        group_of(trainer),
        freeze_of(freeze),
        lossy,
    )
    if isinstance(trainer.training_step, _Stowed):  # type: ignore[attr-defined]
        raise ParameterError("This Trainer already runs under plans: call stow once.")
    stowed = _Stowed(trainer, choices)
    leave_unwrapped(trainer)
    trainer.training_step = stowed  # type: ignore[attr-defined]
    trainer.prediction_step = stowed.predict  # type: ignore[attr-defined]
    trainer.on_device = stowed.on_device  # type: ignore[attr-defined]
    trainer.stowage = stowed  # type: ignore[attr-defined]
    trainer.log = stowed.log_with_plan(trainer.log)  # type: ignore[attr-defined]
    stowed.files = TrainerFiles(trainer, lambda: stowed.step)
    return trainer


class _Stowed:
    """Takes the place of `trainer.training_step`.

    Attributes:
        step: the training step of the latest call.
        files: saves and loads what it trains.
    """

    def __init__(self, trainer: Any, choices: Choices) -> None:
        self._trainer = trainer
        self._original = trainer.training_step
        self._original_prediction = trainer.prediction_step
        self._choices = choices
        self._stepped: dict[str, Any] = {}
        if choices.lossy is not None:
            given = AsStepped(trainer, choices.lossy.batches, lambda: self._stepped)
            self._choices = replace(choices, lossy=replace(choices.lossy, batches=given))
        self._evaluates = True
        self._belongs_to: tuple[Any, ...] = ()
        self._answers = Answers(trainer)
        self._latest: dict[str, Any] | None = None
        self.step: TrainingStep | None = None
        self.files: TrainerFiles | None = None

    def __call__(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        trainer = self._trainer
        require_unwrapped(model)
        model.train()
        _turn(trainer.optimizer, "train")  # as the Trainer's own step does
        if isinstance(num_items_in_batch, int):  # as a number it would be part of the plan
            num_items_in_batch = torch.tensor(num_items_in_batch, device=trainer.args.device)
        batch = {
            "inputs": trainer._prepare_inputs(inputs),
            "num_items_in_batch": num_items_in_batch,
            "micro_batches": getattr(trainer, "current_gradient_accumulation_steps", None),
        }
        self._stepped = batch
        try:
            loss = self._stepped_on(model, batch)
        finally:
            self._stepped = {}
        return loss.as_subclass(torch.Tensor)

    def _stepped_on(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        trainer = self._trainer
        step = self._step_of(model, batch)
        self._latest = {**batch, "inputs": None}
        self._answers.watch()
        update = bool(trainer.accelerator.sync_gradients)
        loss = step(batch, update=update)
        self._answers.updated = update and step.updates_jointly
        self._answers.norm = step.grad_norm if update else None
        return loss

    def predict(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Return loss, logits and labels, in the place of `trainer.prediction_step`."""
        step = self.step
        if step is None or model is not step.model:
            return self._original_prediction(model, inputs, prediction_loss_only, ignore_keys)
        batch = {
            "inputs": self._trainer._prepare_inputs(inputs),
            "loss_only": bool(prediction_loss_only),
            "ignore_keys": ignore_keys,
        }
        if self._evaluates:
            try:
                return self._evaluate(step, batch)
            except TraceError as error:
                self._evaluates = False
                where = ", with all weights in memory" if step.offloads or step.shards else ""
                self._choices.say(f"Evaluation runs as the Trainer runs it{where}: {error}")
        with step.on_device():
            return self._original_prediction(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluate(self, step: TrainingStep, batch: dict[str, Any]) -> Any:
        try:
            return step.evaluate(batch, self._prediction)
        except NO_PLAN:
            if self._latest is None or not step.programs.count({**self._latest, "inputs": batch["inputs"]}):
                raise
            return step.evaluate(batch, self._prediction)

    def _prediction(self, model: nn.Module, batch: Any) -> Any:
        return self._original_prediction(model, copied(batch["inputs"]), batch["loss_only"], batch["ignore_keys"])

    @contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """Lend the model with all parameters and optimizer states in device memory, whatever the budget."""
        if self.step is None:
            yield self._trainer.model
            return
        with self.step.on_device() as model:
            yield model

    def _step_of(self, model: nn.Module, batch: Any) -> TrainingStep:
        """Return the training step for the Trainer's present model, optimizer and arguments."""
        trainer = self._trainer
        limit = trainer.args.max_grad_norm
        norm = float(limit) if limit is not None and limit > 0 else float("inf")  # logged all the same
        optimizer = plain(trainer.optimizer)
        accumulate = trainer.args.gradient_accumulation_steps
        belongs_to = (model, optimizer, norm, accumulate)
        if self.step is None or any(a is not b and a != b for a, b in zip(self._belongs_to, belongs_to)):
            refuse(trainer, offloads=self._choices.offload.anywhere)
            shared = Steps(objective=self._objective, accumulate=accumulate, max_grad_norm=norm, touches=(trainer,))
            step = make_step(model, optimizer, shared, self._choices)
            if self.step is not None and self.step.model is model:
                step.take_over(self.step)
            evaluated = list(first_evaluations(trainer))
            for inputs in evaluated:  # so that a budget in percent is of the largest batch known
                step.programs.count({**batch, "inputs": inputs})
            if batch["micro_batches"] in (None, accumulate):
                step.prepare_cycle(batch)  # so that a budget that is too small is known before training starts
                self._prepare_evaluations(step, evaluated)
            if self.files is not None:
                self.files.set_aside.bring(step)
                self.files.frozen.bring(step)
            self.step, self._belongs_to = step, belongs_to
        return self.step

    def _prepare_evaluations(self, step: TrainingStep, evaluated: Iterable[Any]) -> None:
        """Plan the evaluations before training starts too."""
        loss_only = self._trainer.compute_metrics is None or bool(self._trainer.args.prediction_loss_only)
        for inputs in evaluated:
            batch = {"inputs": inputs, "loss_only": loss_only, "ignore_keys": None}
            try:
                step.prepare_evaluation(batch, self._prediction)
            except TraceError:
                return  # said when the first evaluation begins

    @property
    def plan(self) -> PlanSummary:
        """Return the summary of the latest training step's plan.

        Raises:
            ParameterError: nothing is planned yet.
        """
        if self.step is None:
            raise ParameterError("Nothing is planned yet: the first training step is.")
        return self.step.plan

    def __repr__(self) -> str:
        return repr(self.step) if self.step is not None else "<stowage, nothing planned yet>"

    def log_with_plan(self, log: Callable[..., None]) -> Callable[..., None]:
        """Return the Trainer's `log` with the plan's peak added to what it logs of training."""

        @functools.wraps(log)
        def logged(logs: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
            if self.step is not None and "loss" in logs:
                logs["stowage_peak_MiB"] = round(self.step.plan.device_peak_bytes / MIB, 3)
            log(logs, *arguments, **keywords)

        return logged

    def _objective(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss that the Trainer's own step hands to backward: with its scaling and autocast."""
        losses: list[torch.Tensor] = []

        def backward(loss: torch.Tensor, **_: Any) -> None:
            losses.append(loss)

        with ExitStack() as around:
            around.enter_context(replaced(self._trainer.accelerator, "backward", backward))
            if callable(getattr(self._trainer.optimizer, "train", None)):  # `__call__` has set the mode already
                around.enter_context(replaced(self._trainer.optimizer, "train", lambda: None))
            self._original(model, copied(batch["inputs"]), batch["num_items_in_batch"])
        if len(losses) != 1:
            raise ParameterError(
                f"{type(self._trainer).__name__}.training_step calls accelerator.backward {len(losses)} times: a "
                "planned step has one loss."
            )
        return losses[0]


def _turn(optimizer: Any, mode: str) -> None:
    """Switch the mode of an optimizer that has modes."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()
