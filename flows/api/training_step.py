"""The training step that `fit` returns: runs the plan of each batch, and makes it when it first appears."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.flows.api.binding import ExecutionChoice
from stowage.flows.api.check.shadow import Net
from stowage.flows.api.check.when import Check
from stowage.flows.api.evaluation import Evaluations, Resting
from stowage.flows.api.frozen_steps import FrozenSteps
from stowage.flows.api.history import History
from stowage.flows.api.planner import Planner
from stowage.flows.api.programs import Programs
from stowage.flows.api.reasons import step_text
from stowage.flows.api.step_loss import StepLoss
from stowage.flows.api.step_report import write_step_report
from stowage.flows.api.steps import Say, Steps
from stowage.flows.api.storing import Storing
from stowage.flows.api.whole_steps import whole_step
from stowage.flows.planning.curve_result import Curve
from stowage.flows.planning.planned import Planned
from stowage.stages.ir.errors import NO_PLAN, ParameterError, StaleStep
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.runtime import Program
from stowage.stages.runtime.observe.measure import Measurement, measure_program
from stowage.stages.runtime.observe.tracing import trace_iteration
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.sharding.agreement import CALL, NO_HINTS, agree, heard
from stowage.stages.trace.forward import Forward
from stowage.stages.workload.calls import call_model, compute_loss

Result = TypeVar("Result")


class TrainingStep(Storing):
    """One training iteration under a plan; call it with a batch.

    A plan is valid for one signature: batch structure, shapes and dtypes, non-tensor arguments, train/eval flags,
    `requires_grad`, autocast. It is checked on every call; a new signature is planned when it first appears, from warm
    stores. So is a new place in the cycle of gradient accumulation: whether gradients wait in `.grad`, and whether this
    micro-batch updates.

    Attributes:
        model: the module, with current weights; while weights are offloaded it refuses to be called.
        optimizer: the optimizer that holds the states, or None when gradients stay in `.grad`.
        planned: the plan of the latest call with its tables; `plan` is its summary.
        programs: what is planned so far.
        frozen: what chooses the units that train in each step; None where nothing is ever frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        planner: Planner,
        steps: Steps,
        *,
        execution: ExecutionChoice | None = None,
        check: Check = "powers",
        say: Say = lambda text: None,
        frozen: FrozenSteps | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._say = say
        self.frozen = frozen
        self.programs = programs = Programs(
            model, optimizer, planner, steps, execution=execution, say=say, frozen=frozen
        )
        self._budget, self._ranks = planner.budget, planner.ranks
        self._history = History()
        compute = partial(compute_loss, loss=steps.loss, objective=steps.objective, trains=False)  # all may be frozen
        roots = (steps.loss, steps.objective, *steps.touches)
        left_out = frozen.frozen_parameters if frozen is not None else frozenset[str]
        self._net = Net(model, optimizer, compute, roots, check, say, planner.ranks, left_out)
        self._evaluations = Evaluations(
            model,
            planner,
            programs.binding,
            self._net,
            most=steps.most,
            say=say,
            touches=steps.touches,
        )

    def __repr__(self) -> str:
        return step_text(type(self.model).__name__, type(self.optimizer).__name__, self.programs.known)

    @property
    def planned(self) -> Planned:
        """Return the plan of the latest call, with its tables."""
        if self.programs.latest is None:
            raise ParameterError("Nothing is planned yet: call the step, or `prepare`, first.")
        return self.programs.latest.planned

    @property
    def plan(self) -> PlanSummary:
        """Return the summary of the latest call's plan."""
        return self.planned.summary

    @property
    def updates_jointly(self) -> bool:
        """Return whether the optimizer updates all parameters in one `step()`, after the last gradient."""
        return self.programs.updates_jointly

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Return the global norm of the latest update's gradients before clipping; None without `max_grad_norm`."""
        latest = self.programs.latest
        return latest.program.grad_norm if latest else None

    def prepare(self, batch: Any, *, update: bool = True) -> Program:
        """Return the program for this batch's signature and for the gradients that wait, planned now if it is new.

        Args:
            batch: what the step is called with.
            update: see `__call__`.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        return self.programs.find(batch, update=update)

    def prepare_cycle(self, batch: Any) -> None:
        """Plan the first, a middle and the last micro-batch of an update for this batch's signature.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        self.programs.find_cycle(batch)

    @property
    def evaluation(self) -> Planned | None:
        """Return the plan of the latest call of `evaluate`, with its tables; None before the first."""
        return self._evaluations.planned

    def evaluate(self, batch: Any, forward: Forward = call_model) -> Any:
        """Return what the model returns for a batch in evaluation mode, without gradients, within the device budget.

        The result equals, bit for bit, what `model.eval()` and `model(**batch)` under `torch.no_grad()` give. It is
        planned when a batch of this form first appears: offloaded weights are reloaded as they are read and released
        again. What is returned counts in the budget while it is made; parameters and constants are returned as copies.
        Afterwards weights, states and modes are where and what they were.

        Args:
            batch: with the structure that the model takes.
            forward: `forward(model, batch)`, for those who want something else of the model: `call_model` calls it on
                the batch as it is, also where `fit` was given a `forward` of its own for training.

        Raises:
            Infeasible: the budget cannot be met; it states the smallest feasible one.
            TraceError: the forward cannot be traced.
            StaleStep: plain PyTorch gives something else; see `fit`.
        """
        return self._evaluating(batch, lambda: self._evaluations(batch, forward, self._resting()))

    def prepare_evaluation(self, batch: Any, forward: Forward = call_model) -> None:
        """Plan what `evaluate` would run. A budget in percent is of the largest batch seen, in evaluation too.

        Raises:
            StowageError: see `evaluate`.
        """
        self._evaluating(batch, lambda: self._evaluations.prepare(batch, forward, self._resting()))

    def _evaluating(self, batch: Any, work: Callable[[], Result]) -> Result:
        """Run `work`, and once more where it found no plan and this batch raises a budget in percent."""
        try:
            return work()
        except NO_PLAN:
            if not self.programs.count(batch):
                raise
            return work()

    def _resting(self) -> Resting:
        with heard(self._ranks):  # another rank may have planned already
            return Resting.of(self.planned, self.model, self._budget.nbytes)

    @property
    def offloads(self) -> bool:
        """Return whether parameters or states may be offloaded."""
        return self.programs.offloading is not None

    @property
    def shards(self) -> bool:
        """Return whether several ranks hold a shard of each parameter: all of them save and load together."""
        return self.programs.ranks > 1

    @contextlib.contextmanager
    def on_device(self, names: Iterable[str] | None = None) -> Iterator[nn.Module]:
        """Lend the model with all parameters and optimizer states in device memory, whatever the budget.

        The next step puts them back where its plan wants them. `evaluate` and the functions that save do not need it.
        Ranks that hold shards have whole tensors inside, and shards of what each of them leaves there afterwards.

        Args:
            names: names of parameters and states (`parameter::state`); by default all.

        Raises:
            RankError: another rank calls something else, or names others.
        """
        chosen = None if names is None else list(names)
        self._begin("on_device", {} if chosen is None else {"list of names": ", ".join(chosen)})
        with self.programs.binding.lend(chosen):
            yield self.model

    def _begin(self, call: str, facts: Mapping[str, str] = NO_HINTS) -> None:
        """Hear that all ranks call this method of the step, before anything is exchanged."""
        if self._ranks is not None:
            agree(self._ranks, {CALL: f"step.{call}", **facts})

    def take_over(self, other: TrainingStep) -> None:
        """Take over what another step of the same model has offloaded and chosen, before anything is planned."""
        self.programs.binding.take_over(other.programs.binding)
        chosen = other.frozen.state_dict() if other.frozen is not None else None
        if self.frozen is not None and chosen is not None:
            self.frozen.load_state_dict(chosen)

    def contents(self, call: str = "contents") -> Contents:
        """Return access to the tensors wherever they are, one at a time, after placing them as the plan has them.

        Ranks that hold shards do this together; `call` names for errors what they do it for.

        Raises:
            RankError: another rank calls something else.
        """
        self._begin(call)
        if self.programs.latest:
            program = self.programs.latest.program
            with program.around():
                program.enter()
        return self.programs.binding.contents()

    def __call__(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        """Run one iteration: forward, backward, update; return the loss.

        Ctrl-C waits for its end; a second one breaks it off, and says what state the model is in.

        Args:
            batch: with the structure that the model takes.
            update: False for a micro-batch that is not the last of its update: its gradients are added to `.grad`.
                True clips, updates every parameter with a gradient, and frees the gradients.

        Raises:
            StaleStep: plain PyTorch gives another loss; see `fit`.
        """
        program = self.prepare(batch, update=update)
        program.fresh = True
        with self._history.timed(self._device(), self.optimizer) as found:
            found.append(self._checked(program, batch, lambda: program(batch), lambda loss: loss))
        return StepLoss.of(found[0])

    def _checked(
        self, program: Program, batch: Any, work: Callable[[], Result], loss_of: Callable[[Result], torch.Tensor]
    ) -> Result:
        """Run `work`, one iteration, with the check beside it; a program that has become stale is forgotten."""
        assert self.programs.latest is not None
        if self.frozen is not None:
            self.frozen.begin(program)
        with whole_step(program, self._say):
            try:
                result = self._net.run(self.programs.latest, batch, work, loss_of)
            except StaleStep:
                self.programs.forget(program)
                raise
            if self.frozen is not None and self.programs.latest.micro_batch.update:
                self.frozen.ended()
            self.programs.leave(program)
        return result

    def forget(self) -> None:
        """Forget every plan: the next call traces model and loss anew. Weights, states and stores stay as they are."""
        self.programs.forget()
        self._evaluations.forget()

    def trace(self, batch: Any, path: str | Path, *, update: bool = True) -> list[TraceSpan]:
        """Run one iteration, a real one, which trains, and write where its time goes beside the prediction.

        https://ui.perfetto.dev opens the file, a Chrome trace. The spans are returned too.
        """
        program = self.prepare(batch, update=update)
        _, measured = self._checked(
            program, batch, lambda: trace_iteration(program, lambda: program(batch)), lambda traced: traced[0]
        )
        plan = self.planned
        spans = [*predicted_spans(plan.rows, plan.nodes, plan.slots), *measured]
        labels = {"plan": plan.summary.plan_hash, "method": plan.summary.method, "device": plan.summary.device}
        write_atomically(Path(path), chrome_trace(spans, labels).encode())
        self._history.spans = spans
        return spans

    def gradient_error(self, batch: Any) -> float:
        """Measure what values kept in fewer bits change the gradient of a batch by, with the weights as they are now.

        `plan.gradient_error` is predicted with the weights of when the plan was made; as they move on, and gradients
        become smaller, the change may become larger. `forget` then has it measured and planned anew. It takes the
        memory of a plain forward and backward and of two gradients; nothing trains.

        Returns:
            The norm of the change over the norm of the exact gradient, with `freeze` of what trains in the step under
            way; 0 where nothing is kept in fewer bits.

        Raises:
            ParameterError: the parameters are dealt out to several ranks.
        """
        return self.programs.gradient_error(self.prepare(batch), batch)

    def report(self, path: str | Path, curve: Curve | None = None) -> Path:
        """Write what the plan of the latest call promises, and what the iterations so far gave, as one HTML page.

        The memory of an iteration that `measure` looked at, and the streams of one that `trace` did, are in it too.

        Args:
            path: path of the page, which needs no other file.
            curve: memory against time of the same step, from `curve`.

        Returns:
            The path.

        Raises:
            UnwritableError: the page cannot be written.
        """
        return write_step_report(Path(path), type(self.model).__name__, self.planned, self._history, curve)

    def measure(self, batch: Any, *, update: bool = True) -> Measurement:
        """Run one iteration under the profiler: a real one, which trains, and slower; see `Measurement.peak_bytes`.

        Where the call is compared with plain PyTorch, that is part of it.
        """
        program = self.prepare(batch, update=update)
        if self.frozen is not None:
            # What ranks tell each other about it is released by a thread of gloo, which the profiler does not see.
            self.frozen.schedule.active()

        def run(given: Any) -> torch.Tensor:
            return self._checked(program, given, lambda: program(given), lambda loss: loss)

        found = measure_program(program, self.model, self.optimizer, batch, run)
        self._history.measured(found)
        return found
