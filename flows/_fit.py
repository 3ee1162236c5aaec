"""`fit`: a training step within a memory budget, for a model object in anyone's script."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows import _saving
from stowage.flows._evaluation import Evaluations, MakeForwardPlan, Resting, plan_forward
from stowage.flows._planning import QUICK, Effort, Planned, home_folder, plan_step, target_device
from stowage.flows._tiers import LowerTier, lower_tier
from stowage.flows._weights import LateWeights
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import write_atomically
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.contents import Contents
from stowage.stages.runtime.measure import Measurement, measure_program
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.tracing import trace_iteration
from stowage.stages.trace import MicroBatch, Recorded, RecordedForward, record_step
from stowage.stages.trace.forward import Forward
from stowage.stages.train import checkpoint
from stowage.stages.workload import BatchSignature, ModelSignature, batch_signature, model_signature
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective, call_model

_Key = tuple[BatchSignature, ModelSignature]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakePlan = Callable[[Any, Recorded, MicroBatch, MicroBatch | None, frozenset[str]], Planned]
Say = Callable[[str], None]


class TrainingStep:
    """One training iteration under a plan; call it with a batch.

    A plan is valid for one signature: batch structure, shapes and dtypes, non-tensor arguments, train/eval flags,
    `requires_grad`, autocast. It is checked on every call; a new signature is planned when it first appears, from warm
    stores. So is a new place in the cycle of gradient accumulation: whether gradients wait in `.grad`, and whether this
    micro-batch updates.

    Attributes:
        model: the module, with current weights; called while weights are below the device it refuses.
        optimizer: the optimizer that holds the states, or None when gradients stay in `.grad`.
        planned: the plan of the latest call with its tables; `plan` is its summary.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        make_plan: MakePlan,
        make_forward_plan: MakeForwardPlan,
        *,
        loss: Loss | None = None,
        objective: Objective | None = None,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        late: LateWeights | None = None,
        lower: LowerTier | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._make_plan = make_plan
        self._loss = loss
        self._objective = objective
        self._accumulate = accumulate
        self._max_grad_norm = max_grad_norm
        self._late = late
        self._lower = lower
        self._offloading: Offloading | None = None
        self._say = say
        self._programs: list[tuple[_Key, MicroBatch, Planned, Program]] = []
        self._recorded: tuple[_Key, Recorded] | None = None
        self._evaluations = Evaluations(model, make_forward_plan, self._layouts, self._offloading_for, say)

    @property
    def planned(self) -> Planned:
        """The plan of the latest call, with its tables."""
        if not self._programs:
            raise ParameterError("Nothing is planned yet: call the step, or `prepare`, first.")
        return self._programs[0][2]

    @property
    def plan(self) -> PlanSummary:
        """What the plan of the latest call states about itself."""
        return self.planned.summary

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The global norm of the gradients of the latest update, before clipping; None without `max_grad_norm`."""
        return self._programs[0][3].grad_norm if self._programs else None

    def prepare(self, batch: Any, *, update: bool = True) -> Program:
        """The program for this batch's signature and for the gradients that wait, planned now if it is new.

        Args:
            batch: what the step is called with.
            update: see `__call__`.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        waiting = frozenset(name for name, p in self.model.named_parameters() if p.grad is not None)
        key = (batch_signature(batch), model_signature(self.model))
        return self._program(key, batch, self._micro_batch(waiting, update))

    def prepare_cycle(self, batch: Any) -> None:
        """Plan the first, a middle and the last micro-batch of an update for this batch's signature.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        key = (batch_signature(batch), model_signature(self.model))
        if self._accumulate == 1:
            self._program(key, batch, self._micro_batch(frozenset(), True))
            return
        everything = frozenset(g.parameter for g in self._record(key, batch).gradients if g.gradient_value >= 0)
        self._program(key, batch, self._micro_batch(everything, True))
        if self._accumulate > 2:
            self._program(key, batch, self._micro_batch(everything, False))
        self._program(key, batch, self._micro_batch(frozenset(), False))

    def _micro_batch(self, waiting: frozenset[str], update: bool) -> MicroBatch:
        update = update and self.optimizer is not None
        return MicroBatch(waiting, update, self._max_grad_norm if update else None)

    def _record(self, key: _Key, batch: Any) -> Recorded:
        """Forward and backward; the micro-batches of a signature share the record of the latest."""
        if self._recorded is None or self._recorded[0] != key:
            with torch.random.fork_rng():
                recorded = record_step(
                    self.model, batch, loss=self._loss, objective=self._objective, layouts=self._layouts()
                )
            for notice in recorded.notices:
                self._say(notice)
            self._recorded = (key, recorded)
        return self._recorded[1]

    def _layouts(self) -> dict[str, torch.Tensor]:
        """How parameters lie that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        return late | (self._offloading.layouts() if self._offloading is not None else {})

    def _program(self, key: _Key, batch: Any, micro_batch: MicroBatch) -> Program:
        for position, (known, kind, _, program) in enumerate(self._programs):
            if kind == micro_batch and known == key:
                if position:
                    self._programs.insert(0, self._programs.pop(position))
                return program
        recorded = self._record(key, batch)
        largest = None
        if self._accumulate > 1:
            everything = frozenset(g.parameter for g in recorded.gradients if g.gradient_value >= 0)
            largest = self._micro_batch(everything, True)
        with torch.random.fork_rng(), without_autocast():  # planning must not change what the user's generators give
            other = None if largest == micro_batch else largest
            planned = self._make_plan(batch, recorded, micro_batch, other, self._away(key, micro_batch))
        offloading = self._offloading_for(planned)
        if self._late is not None:
            self._late.load(offloading, planned.slots)
        program = bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self.model,
            self.optimizer,
            planned.slots,
            offloading,
        )
        self._programs.insert(0, (key, micro_batch, planned, program))
        return program

    def _away(self, key: _Key, micro_batch: MicroBatch) -> frozenset[str]:
        """What rests below between iterations under the plan of the update that this micro-batch leads to."""
        for known, kind, planned, _ in self._programs if not micro_batch.update else ():
            if kind.update and known == key:
                return frozenset(s.name for s in planned.slots if s.role != "temporary" and s.start == "below")
        return frozenset()

    def _offloading_for(self, planned: Planned) -> Offloading | None:
        """One tier for all programs of the model, opened when the first plan needs it."""
        if self._offloading is None and planned.slots and self._lower is not None:
            self._offloading = Offloading(self._lower.open(), self.model, self.optimizer)
        return self._offloading

    @property
    def evaluation(self) -> Planned | None:
        """The plan of the latest call of `evaluate`, with its tables; None before the first."""
        return self._evaluations.planned

    def evaluate(self, batch: Any, forward: Forward = call_model) -> Any:
        """What the model returns for a batch in evaluation mode, without gradients, within the device budget.

        The same object, bit for bit, as `model.eval()` and `model(**batch)` under `torch.no_grad()` give. It is planned
        when a batch of this form first appears: weights that live below come as they are read and go. What is returned
        counts in the budget while it is made; parameters and constants are returned as copies. Afterwards weights,
        states and modes are where and what they were.

        Args:
            batch: with the structure that the model takes.
            forward: `forward(model, batch)`, for those who want something else of the model.

        Raises:
            Infeasible: the budget cannot be met; it states the smallest feasible one.
            TraceError: the forward cannot be traced.
        """
        return self._evaluations(batch, forward, Resting.of(self.planned, self.model))

    @property
    def offloads(self) -> bool:
        """Parameters or states may be below the device."""
        return self._offloading is not None

    @contextlib.contextmanager
    def on_device(self, names: Iterable[str] | None = None) -> Iterator[nn.Module]:
        """The model with all parameters and optimizer states in device memory, whatever the budget: to look into it.

        The next step puts them back where its plan wants them. `evaluate` and the functions that save do without.

        Args:
            names: of parameters and states (`parameter::state`); by default all.
        """
        if self._offloading is None:
            yield self.model
            return
        here = self._offloading.fetch_all(names)
        try:
            yield self.model
        finally:
            self._offloading.forget_copies(here)

    def take_over(self, other: TrainingStep) -> None:
        """Go on with what another step of the same model has below the device, before anything is planned."""
        self._offloading = other._offloading
        if self._offloading is not None and self.optimizer is not other.optimizer:
            self._offloading.serve(self.optimizer)

    def contents(self) -> Contents:
        """Tensors wherever they are, one at a time; what the plan has below is there."""
        if self._programs:
            self._programs[0][3].enter()
        return Contents(self.model, self.optimizer, self._offloading)

    def save(self, path: str | Path, scheduler: Any = None) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, the schedule if given, the random state.

        This and the functions below go tensor by tensor, within the budget; files are safetensors, complete or absent.
        """
        checkpoint.save_checkpoint(Path(path), "", 0, self.contents(), scheduler, [])

    def load(self, path: str | Path, scheduler: Any = None) -> None:
        """Go on from what `save` wrote: the numbers that follow are those of a run that was not interrupted.

        Raises:
            StowageError: there is no such file, it is damaged, or of another model.
        """
        if checkpoint.load_checkpoint(Path(path), "", self.contents(), scheduler) is None:
            raise ParameterError(f"There is no checkpoint at {path}.")

    def save_model(self, path: str | Path) -> None:
        """Weights and persistent buffers under the names of `state_dict`; `safetensors.torch.load_model` reads it."""
        _saving.save_model(Path(path), self.contents())

    def load_model(self, path: str | Path) -> None:
        """Replace weights and persistent buffers by those of a safetensors file."""
        _saving.load_model(Path(path), self.contents())

    def save_optimizer(self, path: str | Path) -> None:
        """The optimizer's `state_dict`, as safetensors; `load_optimizer` reads it."""
        checkpoint.save_optimizer(Path(path), self.contents())

    def load_optimizer(self, path: str | Path) -> None:
        """Replace the optimizer's groups and states by those of a file."""
        checkpoint.load_optimizer(Path(path), self.contents())

    def save_pretrained(self, folder: str | Path) -> None:
        """As `model.save_pretrained(folder)` of a `transformers` or `peft` model."""
        _saving.save_pretrained(Path(folder), self.contents())

    def __call__(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        """One iteration: forward, backward, update. Returns the loss.

        Args:
            batch: with the structure that the model takes.
            update: False for a micro-batch that is not the last of its update: its gradients are added to `.grad`.
                True clips, updates every parameter with a gradient, and frees the gradients.
        """
        program = self.prepare(batch, update=update)
        with without_autocast():  # the casts are in the program
            return program(batch)

    def trace(self, batch: Any, path: str | Path, *, update: bool = True) -> list[TraceSpan]:
        """One iteration, a real one, which trains; where its time goes, as a Chrome trace beside the prediction.

        https://ui.perfetto.dev opens the file. The spans are returned too.
        """
        program = self.prepare(batch, update=update)
        with without_autocast():
            _, measured = trace_iteration(program, lambda: program(batch))
        plan = self.planned
        spans = [*predicted_spans(plan.rows, plan.nodes, plan.slots), *measured]
        labels = {"plan": plan.summary.plan_hash, "method": plan.summary.method, "device": plan.summary.device}
        write_atomically(Path(path), chrome_trace(spans, labels).encode())
        return spans

    def measure(self, batch: Any, *, update: bool = True) -> Measurement:
        """One iteration under the profiler: a real one, which trains, and slower. See `Measurement.peak_bytes`."""
        program = self.prepare(batch, update=update)
        with without_autocast():
            return measure_program(program, self.model, self.optimizer, batch)


def print_notice(text: str) -> None:
    """Where notices go by default."""
    print(text, file=sys.stderr)


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    device_budget: str | int,
    loss: Loss | None = None,
    objective: Objective | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    method: str = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    late: LateWeights | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    say: Say = print_notice,
) -> TrainingStep:
    """A training step that has not planned anything yet; see `fit`.

    Raises:
        ParameterError: an argument is wrong.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ParameterError(f"accumulate is {accumulate!r}: give the number of micro-batches of an update, 1 or more.")
    if max_grad_norm is not None:
        if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0:
            raise ParameterError(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None to clip nothing.")
        if optimizer is None:
            raise ParameterError("max_grad_norm clips before updates, but there is no optimizer: pass one to fit.")
        max_grad_norm = float(max_grad_norm)
    home = home_folder(cache_dir)
    device = next((p.device.type for p in model.parameters()), "cpu")
    lower = lower_tier(
        target_device(device, home),
        host_budget=host_budget,
        disk_budget=disk_budget,
        offload_dir=offload_dir,
        method=method,
    )

    below = replace(lower.below, gradients=optimizer is not None) if lower else None

    def make_plan(
        sample: Any,
        recorded: Recorded,
        micro_batch: MicroBatch,
        largest: MicroBatch | None,
        away: frozenset[str],
    ) -> Planned:
        return plan_step(
            model,
            sample,
            loss=loss,
            optimizer=optimizer,
            device_budget=device_budget,
            method=method,
            home=home / "quick" if quick else home,
            recorded=recorded,
            micro_batch=micro_batch,
            largest=largest,
            effort=QUICK if quick else Effort(),
            below=below,
            away=away,
        )

    def make_forward_plan(recorded: RecordedForward, resting: Resting) -> Planned:
        return plan_forward(
            model,
            recorded,
            resting,
            home=home / "quick" if quick else home,
            effort=QUICK if quick else Effort(),
            below=below,
        )

    return TrainingStep(
        model,
        optimizer,
        make_plan,
        make_forward_plan,
        loss=loss,
        objective=objective,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        late=late,
        lower=lower,
        say=say,
    )


def fit(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    device_budget: str | int,
    loss: Loss | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    method: str = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    weights: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
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
            buffers, inputs, workspace): `900MiB`, `1.5GiB`, bytes, or `50%` of the predicted peak of plain PyTorch.
        loss: `loss(outputs, batch)`; by default `outputs.loss`. With accumulation divide it yourself, as in plain
            PyTorch.
        accumulate: micro-batches of one update, so that all of them are planned now. Call the step with
            `update=False` for all but the last.
        max_grad_norm: clip gradients by their global norm, as `torch.nn.utils.clip_grad_norm_` does; `grad_norm` has
            the norm. `inf` computes it and clips nothing.
        method: `auto` picks; `rockmate` forces RK-Checkmate and RK-Rotor; `offmate` forces offloading.
        host_budget: pinned host memory that a model on a GPU may use for parameters, optimizer states and activations.
        disk_budget: bytes that they may take in `offload_dir`; by default what is free there.
        offload_dir: a folder on a fast disk: what does not fit `device_budget` lives there; on a machine with a GPU
            what does not fit `host_budget` either.
        weights: a safetensors file, or a folder of them, for a model on the meta device: each tensor is read straight
            into the tier where it lives, so that the model may be larger than RAM.
        cache_dir: where costs, options and plans are kept; default `STOWAGE_HOME` or the user's cache folder.
        quick: plan in seconds instead of a minute or so, less well: fewer samples of each operation, fewer schedules.
        say: receives notices, one sentence each.

    Under `torch.autocast` the forward and the loss run with its casts; call the step under it too.

    Raises:
        Infeasible: the budget cannot be met; it states the smallest feasible one.
        TraceError: the model cannot be traced; the text names the module and the line.
        ParameterError: an argument is wrong.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and any(p.is_meta for p in model.parameters()):
        raise ParameterError(
            "Parameters on the meta device are replaced when their weights are loaded: pass a function that makes the "
            "optimizer, not a ready one."
        )
    late = LateWeights(model, batch, weights)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()))
    if optimizer is not None:
        _check_holds(optimizer, model)
    step = make_step(
        model,
        optimizer,
        device_budget=device_budget,
        loss=loss,
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        method=method,
        host_budget=host_budget,
        disk_budget=disk_budget,
        offload_dir=offload_dir,
        late=late,
        cache_dir=cache_dir,
        quick=quick,
        say=say,
    )
    step.prepare_cycle(batch)
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
