"""Finds the program for a batch and for the gradients that wait; it is planned when it first appears."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from stowage.flows.api.binding import Binding, ExecutionChoice
from stowage.flows.api.frozen_steps import FrozenSteps
from stowage.flows.api.interrupt import ends_in_one_line
from stowage.flows.api.live.programs import set_numbers, with_live_numbers
from stowage.flows.api.live.readings import Key, Live
from stowage.flows.api.measured_batches import measured_batches
from stowage.flows.api.micro_batches import bytes_of, micro_batch_of, place_text, with_gradient
from stowage.flows.api.planner import Planner
from stowage.flows.api.reasons import form_of, planned_text, tensors_text, why
from stowage.flows.api.recent import Recent
from stowage.flows.api.recording import Recording
from stowage.flows.api.steps import SPARE, KnownSteps, Say, Steps
from stowage.flows.planning.effort import QUICK
from stowage.flows.planning.planned import Planned
from stowage.flows.planning.true_kernels import with_true_kernels
from stowage.stages.device import current
from stowage.stages.ir.errors import NO_PLAN, Infeasible, NoRoomInLowerTier, ParameterError, StowageError
from stowage.stages.optimizers import KnownOptimizer, OptimizerSignature
from stowage.stages.rewrite import rewritten
from stowage.stages.runtime import Program
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.program import forget_source
from stowage.stages.runtime.sharding.agreement import CALL, NO_HINTS, heard, together
from stowage.stages.sensitivity import StepTensors, gradient_error
from stowage.stages.structure.generators import forked_generators
from stowage.stages.trace import MicroBatch, Outside, Recorded, with_outside, with_updates
from stowage.stages.workload import BatchSignature, batch_signature
from stowage.stages.workload.autocast import without_autocast


class Programs:
    """Programs of one model: finds the one that is needed, or makes it.

    Attributes:
        known: programs, the one found last first.
        binding: makes programs of plans, and has the lower tier.
        live: the recorded steps of these programs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        planner: Planner,
        steps: Steps,
        *,
        execution: ExecutionChoice | None = None,
        say: Say = lambda text: None,
        frozen: FrozenSteps | None = None,
    ) -> None:
        self._frozen = frozen
        self._model = model
        self._device = next((p.device for p in model.parameters()), None)
        self._optimizer = optimizer
        self._known_optimizer = steps.known_optimizer or (KnownOptimizer(optimizer) if optimizer is not None else None)
        self._planner = planner
        self._steps = steps
        self._say = say
        self.known = Recent[KnownSteps](steps.most)
        roots = {"loss": steps.loss, "objective": steps.objective, **steps.roots}
        self._recording = Recording(model, steps, planner.watch, say)
        self.live = Live(model, roots, self._record_anew, say, most=steps.most + SPARE)
        self._seen: dict[BatchSignature, None] = {}
        self._made: dict[tuple[int, MicroBatch], str] = {}
        self.binding = Binding(model, optimizer, execution or ExecutionChoice(), self.live.watch.tree)

    @property
    def offloading(self) -> Offloading | None:
        """Return the offloading to the lower tier, or None while no plan has used it."""
        return self.binding.offloading

    @property
    def latest(self) -> KnownSteps | None:
        """Return the program that was found last."""
        return self.known.latest

    def key(self, batch: Any) -> Key:
        """Return what a program is valid for: the form of a batch, and everything else that the step reads."""
        return self.live.find(batch).key

    def find(self, batch: Any, *, update: bool = True) -> Program:
        """Return the program for this batch and for the gradients that wait.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        with current(self._device):
            with heard(self._planner.ranks):
                key = self.key(batch)
                self._admit(key)
                waiting = frozenset(name for name, p in self._parameters(key, batch).items() if p.grad is not None)
            return self._find(key, batch, self._micro_batch(self._with_frozen(waiting, key, batch), update))

    def _with_frozen(self, waiting: frozenset[str], key: Key, batch: Any) -> frozenset[str]:
        """Return what would wait if nothing were frozen: one plan serves every choice of what trains."""
        if self._frozen is None or not waiting:
            return waiting
        everything = with_gradient(self._record(key, batch))
        return everything if waiting == everything - self._frozen.frozen_parameters() else waiting

    def _admit(self, key: Key) -> None:
        """Refuse a form that was not planned ahead, where none may be planned now.

        Raises:
            ParameterError: the form is new, and `new_shapes` is `error`.
        """
        if self._steps.new_shapes == "error" and self._seen and key[0] not in self._seen:
            forms = "; ".join(dict.fromkeys(map(form_of, self._seen)))
            raise ParameterError(
                f"There is no plan for a batch of {form_of(key[0])}, and new_shapes is 'error': this run has plans for "
                f"{forms}; pad to one of these, or name it in forms."
            )

    def _parameters(self, key: Key, batch: Any) -> dict[str, torch.Tensor]:
        """Return the model's parameters, and those outside of it that a step of this signature reads."""
        return with_outside(self.live.watch.tree.parameters, self._record(key, batch).outside)

    def find_cycle(self, batch: Any, *, ahead: bool = False) -> None:
        """Find the programs of the first, a middle and the last micro-batch of an update.

        Args:
            batch: a batch of the form wanted.
            ahead: training does not wait yet: what does not fit as it is may be measured and searched in full.

        Raises:
            Infeasible: one of them does not fit; what is stated as the least memory suffices for all.
            StowageError: the step cannot be traced or planned.
        """
        with current(self._device):
            self._find_cycle(batch, ahead=ahead)

    def _find_cycle(self, batch: Any, *, ahead: bool) -> None:
        with heard(self._planner.ranks):
            key = self.key(batch)
            everything = with_gradient(self._record(key, batch)) if self._steps.accumulate > 1 else frozenset[str]()
        failures: list[Infeasible | NoRoomInLowerTier] = []
        for micro_batch in self._cycle(everything):
            try:
                if failures:  # it is refused: nothing of the model may move any more
                    with_true_kernels(
                        partial(self._planned, key, batch, micro_batch, "", ahead=ahead), lambda: self.live.again(key)
                    )
                else:
                    self._find(key, batch, micro_batch, ahead=ahead)
            except NO_PLAN as failure:
                failures.append(failure)
        if failures:
            raise max(failures, key=lambda f: f.smallest_feasible_bytes)

    def _cycle(self, everything: frozenset[str]) -> list[MicroBatch]:
        """Return the kinds of micro-batches of an update, the one that needs most memory first."""
        count = self._steps.accumulate
        if count == 1:
            return [self._micro_batch(frozenset(), True)]
        middle = [self._micro_batch(everything, False)] if count > 2 else []
        return [self._micro_batch(everything, True), *middle, self._micro_batch(frozenset(), False)]

    def find_ahead(self, batches: Iterable[Any]) -> None:
        """Find programs for batches of several forms, each once and the largest first.

        A budget in percent is of the largest one, and bounds the others.

        Raises:
            StowageError: a step cannot be traced or planned.
        """
        distinct = {batch_signature(batch): batch for batch in batches}
        for batch in sorted(distinct.values(), key=bytes_of, reverse=True):
            self.find_cycle(batch, ahead=True)

    def count(self, batch: Any) -> bool:
        """Let a training step on this batch raise a budget in percent; return whether it has grown."""
        before = self._planner.budget.nbytes
        if not self._planner.budget.grows:
            return False
        try:
            with current(self._device):
                key = self.key(batch)
                with_true_kernels(lambda: self._count(key, batch), lambda: self.live.again(key))
        except (StowageError, TypeError, ValueError, KeyError, AttributeError, RuntimeError):
            return False  # not every batch of an evaluation can be trained on
        return self._planner.budget.nbytes > before

    def _count(self, key: Key, batch: Any) -> None:
        recorded = self._record(key, batch)
        with forked_generators(), without_autocast():
            waiting = with_gradient(recorded) if self._steps.accumulate > 1 else frozenset[str]()
            self._planner.count(recorded, self._micro_batch(waiting, True))

    def forget(self, program: Program | None = None) -> None:
        """Forget a program, by default all, so that its signature is traced anew."""
        for known in self.known:
            if program is None or known.program is program:
                self.live.forget(known.key)
        self.known.forget(lambda known: program is None or known.program is program)

    def leave(self, program: Program) -> None:
        """Store what the program's latest iteration left where the user's forward and loss store it."""
        known = next((k for k in self.known if k.program is program), None)
        tensors = program.take_left()
        recorded = self.live.of(known.key).recorded if known is not None else None
        if recorded is None or not (recorded.left.effects or recorded.left.checks):
            return
        recorded.left.check(tensors)
        decided = recorded.left.decided(tensors)
        if decided is None:
            recorded.left.apply(tensors)
            return
        self._recording.decisions = decided
        self.forget(program)
        self._say(
            "What this step leaves in your objects depends on a tensor's value, which was another one than when the "
            "step was traced: it is left out once, and traced again for the next step."
        )

    def _micro_batch(self, waiting: frozenset[str], update: bool) -> MicroBatch:
        return micro_batch_of(self._steps, waiting, update=update and self._optimizer is not None)

    def _find(self, key: Key, batch: Any, micro_batch: MicroBatch, *, ahead: bool = False) -> Program:
        optimizer = self._groups()
        stands = not self.binding.changes()  # a parameter in the place of another is none that ranks have cut
        known = self.known.find(
            lambda known: (
                stands and (known.micro_batch, known.optimizer) == (micro_batch, optimizer) and known.key is key
            )
        )
        if self._planner.ranks is not None:  # one process describes nothing
            self._planner.agree(
                {
                    CALL: "step(batch)",
                    "batch": form_of(key[0]),
                    "tensor in the batch": tensors_text(key[0]),
                    "place in the update": place_text(micro_batch),
                    "plan": self._made[id(key), micro_batch] if known is not None else "none yet",
                },
                {"plan": reason} if known is None and (reason := self._reason(key, micro_batch)) else NO_HINTS,
            )
        if known is None:
            known = with_true_kernels(
                lambda: self._make(key, batch, micro_batch, ahead=ahead), lambda: self.live.again(key)
            )
            self._drop(self.known.add(known))
        self._seen.setdefault(key[0])
        return self._with_numbers(known).program

    def _with_numbers(self, known: KnownSteps) -> KnownSteps:
        """Return a program whose code reads the numbers that its step reads at each call now, made anew if need be."""
        traced = self.live.of(known.key)
        if known.version != traced.version:
            planned = with_live_numbers(known.planned, traced, self._model, self._known_optimizer, known.micro_batch)
            assert traced.recorded is not None
            program = self.binding.bind(planned, traced.recorded.outside)
            renewed = known._replace(planned=planned, program=program, version=traced.version)
            self.known.replace(known, renewed)
            known = renewed
        set_numbers(known.program, traced)
        return known

    def _drop(self, known: Sequence[KnownSteps]) -> None:
        """Forget the source code that Python keeps of these programs."""
        kept = {k.planned.folder for k in self.known}
        for folder in {k.planned.folder for k in known} - kept:
            forget_source(str(folder / "step.py"))

    def _make(self, key: Key, batch: Any, micro_batch: MicroBatch, *, ahead: bool) -> KnownSteps:
        began = time.perf_counter()
        reason = self._reason(key, micro_batch)
        recorded, planned = self._planned(key, batch, micro_batch, reason, ahead=ahead)
        if self._planner.ranks is not None:
            made = self._made[id(key), micro_batch] = planned.digest()
            self._planner.agree({"plan": made, **self.binding.changes()})  # parameters are dealt out as it is bound
        program = together(self._planner.ranks, lambda: self.binding.bind(planned, recorded.outside))
        took_s = time.perf_counter() - began + self._recording.untold_s
        self._say(planned_text(planned.summary, took_s, reason, self._recording.traced_s))
        self._recording.untold_s = 0.0
        # The groups are read now: planning has learnt which of their entries the optimizer changes itself.
        return KnownSteps(self._groups(), key, self._planner.in_buckets(micro_batch), planned, program)

    def _reason(self, key: Key, micro_batch: MicroBatch) -> str:
        """Say why a step is planned; "" for the first one of a run."""
        if not self.known and not self._seen:
            return ""
        same = next((k for k in self.known if k.key is key and k.micro_batch == micro_batch), None)
        optimizer = self._groups()
        if same is not None and same.optimizer is not None and optimizer is not None and same.optimizer != optimizer:
            names = {id(p): name for name, p in self._model.named_parameters()}
            differences = same.optimizer.differences(optimizer, names)
            return "the optimizer has changed: " + differences[0].removesuffix(".")
        return why(*key, micro_batch, [k.key for k in self.known], self._seen)

    def _planned(
        self, key: Key, batch: Any, micro_batch: MicroBatch, reason: str, *, ahead: bool
    ) -> tuple[Recorded, Planned]:
        with heard(self._planner.ranks):
            recorded = self._record(key, batch)
        watch = self._planner.watch
        with ends_in_one_line(watch, self._say), watch.shown(reason):
            try:
                return recorded, self._plan(recorded, key, batch, micro_batch, reason, ahead=ahead)
            except Infeasible as error:
                raise error.about("training", form_of(key[0])) from None

    def _groups(self) -> OptimizerSignature | None:
        """Return what plans depend on of the optimizer."""
        return self._known_optimizer.signature() if self._known_optimizer is not None else None

    @property
    def ranks(self) -> int:
        """Return the number of ranks that train together."""
        return self._steps.ranks

    @property
    def updates_jointly(self) -> bool:
        """Return whether the optimizer updates all parameters in one `step()`, after the last gradient."""
        return self._known_optimizer is not None and bool(self._known_optimizer.habits.joint)

    def _plan(
        self, recorded: Recorded, key: Key, batch: Any, micro_batch: MicroBatch, reason: str, *, ahead: bool
    ) -> Planned:
        largest = None
        if self._steps.accumulate > 1:
            largest = self._micro_batch(with_gradient(recorded), True)
        with forked_generators(), without_autocast():  # planning must not change what the user's generators give
            return self._planner.training_step(
                recorded,
                micro_batch,
                None if largest == micro_batch else largest,
                self._offloaded(key, micro_batch),
                effort=QUICK if self._steps.new_shapes == "quick" and self._seen and not ahead else None,
                in_full=ahead,
                slow=lambda: self._say(f"Planning, {reason}: training waits for it.") if reason else None,
                live=lambda: self._lent(batch, recorded.outside),
            )

    @contextmanager
    def _lent(self, batch: Any, outside: Outside) -> Iterator[list[StepTensors]]:
        """Lend the tensors that a step reads, all of them in memory, for each batch to measure codes on."""
        lossy = self._planner.lossy
        batches, notice = measured_batches(batch, lossy) if lossy is not None else ([batch], "")
        if notice and not self._seen:
            self._say(notice)
        with self.binding.lend(None):
            yield [StepTensors.of(self._model, each, outside) for each in batches]

    def gradient_error(self, program: Program, batch: Any) -> float:
        """Return what the codes of a program change the gradient of a batch by, with the weights as they are.

        Raises:
            ParameterError: the parameters are dealt out to several ranks.
        """
        known = next(known for known in self.known if known.program is program)
        summary = known.planned.summary
        if summary.exact:
            return 0.0
        if self.ranks > 1:
            raise ParameterError("step.gradient_error measures whole gradients: call it where one process trains.")
        recorded = self._record(known.key, batch)
        plain = with_updates(recorded, self._model, micro_batch=MicroBatch())
        active = self._frozen.schedule.active() if self._frozen is not None else frozenset()
        trained = [name for unit in known.planned.units if unit.name in active for name in unit.parameters]
        with without_autocast(), self.binding.lend(None):
            live = [StepTensors.of(self._model, batch, recorded.outside)]
            return gradient_error(
                plain, rewritten(plain, summary.variant), live, among=[trained] if self._frozen is not None else ()
            )

    def _record(self, key: Key, batch: Any) -> Recorded:
        """Return the recorded forward and backward, which the micro-batches of a signature share."""
        return self.live.recorded(key, batch)

    def _record_anew(self, batch: Any) -> Recorded:
        return self._recording.record(batch, self.binding)

    def _offloaded(self, key: Key, micro_batch: MicroBatch) -> frozenset[str]:
        """Return what is offloaded between iterations under the plan of the update that follows this micro-batch."""
        for known in self.known if not micro_batch.update else ():
            if known.micro_batch.update and known.key is key and known.optimizer == self._groups():
                slots = known.planned.slots
                return frozenset(s.name for s in slots if s.role != "temporary" and s.start == "offloaded")
        return frozenset()
