"""The training step that `fit` returns: runs the plan of each batch, and makes it when it first appears."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.flows import _saving
from stowage.flows._evaluation import Evaluations, MakeForwardPlan, Resting
from stowage.flows._planning import Planned
from stowage.flows._shadow import Check, Net
from stowage.flows._tiers import LowerTier
from stowage.flows._weights import LateWeights
from stowage.stages.ir.errors import ParameterError, StaleStep
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import write_atomically
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.contents import Contents
from stowage.stages.runtime.measure import Measurement, measure_program
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.resident import resident_limit
from stowage.stages.runtime.tracing import trace_iteration
from stowage.stages.trace import MicroBatch, Recorded, record_step
from stowage.stages.trace.forward import Forward
from stowage.stages.train import checkpoint
from stowage.stages.workload import BatchSignature, ModelSignature, batch_signature, model_signature
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective, call_model, compute_loss

_Key = tuple[BatchSignature, ModelSignature]
MakePlan = Callable[[Any, Recorded, MicroBatch, MicroBatch | None, frozenset[str]], Planned]
Say = Callable[[str], None]
Result = TypeVar("Result")


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
        check: Check = "powers",
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
        compute = partial(compute_loss, loss=loss, objective=objective)
        self._net = Net(model, optimizer, compute, (loss, objective), check, say)
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
            tier = self._lower.open()
            limit = resident_limit(self.model, self.optimizer, planned.summary.device_budget_bytes)
            self._offloading = Offloading(tier, self.model, self.optimizer, limit)
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

        Raises:
            StaleStep: plain PyTorch gives another loss; see `fit`.
        """
        program = self.prepare(batch, update=update)
        return self._checked(program, batch, lambda: program(batch), lambda loss: loss)

    def _checked(
        self, program: Program, batch: Any, work: Callable[[], Result], loss_of: Callable[[Result], torch.Tensor]
    ) -> Result:
        """Run `work`, one iteration, under the net; a program that has become stale is forgotten."""
        try:
            return self._net.run(program, self.planned, batch, work, loss_of)
        except StaleStep:
            self._recorded = None
            self._programs = [known for known in self._programs if known[3] is not program]
            raise

    def forget(self) -> None:
        """Forget every plan: the next call traces model and loss anew. Weights, states and stores stay as they are."""
        self._recorded = None
        self._programs.clear()
        self._evaluations.forget()

    def trace(self, batch: Any, path: str | Path, *, update: bool = True) -> list[TraceSpan]:
        """One iteration, a real one, which trains; where its time goes, as a Chrome trace beside the prediction.

        https://ui.perfetto.dev opens the file. The spans are returned too.
        """
        program = self.prepare(batch, update=update)
        _, measured = self._checked(
            program, batch, lambda: trace_iteration(program, lambda: program(batch)), lambda traced: traced[0]
        )
        plan = self.planned
        spans = [*predicted_spans(plan.rows, plan.nodes, plan.slots), *measured]
        labels = {"plan": plan.summary.plan_hash, "method": plan.summary.method, "device": plan.summary.device}
        write_atomically(Path(path), chrome_trace(spans, labels).encode())
        return spans

    def measure(self, batch: Any, *, update: bool = True) -> Measurement:
        """One iteration under the profiler: a real one, which trains, and slower. See `Measurement.peak_bytes`.

        Where the call is compared with plain PyTorch, that is part of it.
        """
        program = self.prepare(batch, update=update)

        def run(given: Any) -> torch.Tensor:
            return self._checked(program, given, lambda: program(given), lambda loss: loss)

        return measure_program(program, self.model, self.optimizer, batch, run)
