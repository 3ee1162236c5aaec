"""Programs of one model: the one for a batch and for the gradients that wait, planned when it first appears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from stowage.flows._live import Key, Live
from stowage.flows._live_programs import set_numbers, with_live_numbers
from stowage.flows._planned import Planned
from stowage.flows._tiers import LowerTier
from stowage.flows._true_kernels import with_true_kernels
from stowage.flows._weights import LateWeights
from stowage.stages.optimizers import KnownOptimizer, OptimizerSignature
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.resident import resident_limit
from stowage.stages.trace import MicroBatch, Outside, Recorded, parameters_of, record_step
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective

Say = Callable[[str], None]
MakePlan = Callable[[Any, Recorded, MicroBatch, MicroBatch | None, frozenset[str]], Planned]


@dataclass(frozen=True)
class Steps:
    """What every program of a model shares.

    Attributes:
        loss, objective: see `record_step`.
        accumulate: micro-batches of an update.
        max_grad_norm: of clipping, or None.
        roots: what else the step may read, by name.
        known_optimizer: what has been learnt of the optimizer.
    """

    loss: Loss | None = None
    objective: Objective | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    known_optimizer: KnownOptimizer | None = None


class Known(NamedTuple):
    """A program, what it is for, the tensors that it reads outside of model and batch, by name, and what it leaves."""

    optimizer: OptimizerSignature | None
    """Its groups, when it was planned."""

    key: Key
    micro_batch: MicroBatch
    planned: Planned
    program: Program
    version: int = 0
    """Of the numbers that its code reads at each call; see `Traced`."""


class Programs:
    """Finds programs, and makes what it does not find.

    Attributes:
        known: programs, the one found last first.
        offloading: the tier below the device, once a plan has used it.
        live: the recorded steps that they are of.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        make_plan: MakePlan,
        steps: Steps,
        *,
        late: LateWeights | None = None,
        lower: LowerTier | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._known_optimizer = steps.known_optimizer or (KnownOptimizer(optimizer) if optimizer is not None else None)
        self._make_plan = make_plan
        self._steps = steps
        self._late = late
        self._lower = lower
        self._say = say
        self.known: list[Known] = []
        self._decisions: tuple[bool, ...] = ()
        self.live = Live(
            model, {"loss": steps.loss, "objective": steps.objective, **steps.roots}, self._record_anew, say
        )
        self.offloading: Offloading | None = None

    @property
    def latest(self) -> Known | None:
        """What was found last."""
        return self.known[0] if self.known else None

    def key(self, batch: Any) -> Key:
        """What a program is valid for: the form of a batch, and everything else that the step reads."""
        return self.live.find(batch).key

    def find(self, batch: Any, *, update: bool = True) -> Program:
        """The program for this batch and for the gradients that wait.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        key = self.key(batch)
        waiting = frozenset(name for name, p in self._parameters(key, batch).items() if p.grad is not None)
        return self._find(key, batch, self._micro_batch(waiting, update))

    def _parameters(self, key: Key, batch: Any) -> dict[str, torch.Tensor]:
        """The model's, and those outside of it that a step of this signature reads."""
        return parameters_of(self._model, self._record(key, batch).outside)

    def find_cycle(self, batch: Any) -> None:
        """Programs of the first, a middle and the last micro-batch of an update.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        key = self.key(batch)
        if self._steps.accumulate == 1:
            self._find(key, batch, self._micro_batch(frozenset(), True))
            return
        everything = self._everything(self._record(key, batch))
        self._find(key, batch, self._micro_batch(everything, True))
        if self._steps.accumulate > 2:
            self._find(key, batch, self._micro_batch(everything, False))
        self._find(key, batch, self._micro_batch(frozenset(), False))

    def forget(self, program: Program | None = None) -> None:
        """Forget a program, by default all: its signature is traced anew."""
        for known in self.known:
            if program is None or known.program is program:
                self.live.forget(known.key)
        self.known = [k for k in self.known if program is not None and k.program is not program]

    def leave(self, program: Program) -> None:
        """Put what the program's latest iteration leaves where the user's forward and loss leave it."""
        known = next((k for k in self.known if k.program is program), None)
        tensors = program.take_left()
        recorded = self.live.of(known.key).recorded if known is not None else None
        if recorded is None or not recorded.left.effects:
            return
        decided = recorded.left.decided(tensors)
        if decided is None:
            recorded.left.apply(tensors)
            return
        self._decisions = decided
        self.forget(program)
        self._say(
            "What this step leaves in your objects depends on a tensor's value, which was another one than when the "
            "step was traced: it is left out once, and traced again for the next step."
        )

    def _micro_batch(self, waiting: frozenset[str], update: bool) -> MicroBatch:
        update = update and self._optimizer is not None
        return MicroBatch(waiting, update, self._steps.max_grad_norm if update else None)

    @staticmethod
    def _everything(recorded: Recorded) -> frozenset[str]:
        """Parameters that get a gradient."""
        return frozenset(g.parameter for g in recorded.gradients if g.gradient_value >= 0)

    def _find(self, key: Key, batch: Any, micro_batch: MicroBatch) -> Program:
        optimizer = self._groups()
        for position, known in enumerate(self.known):
            if known.micro_batch == micro_batch and known.key is key and known.optimizer == optimizer:
                self.known.pop(position)
                break
        else:
            known = with_true_kernels(lambda: self._make(key, batch, micro_batch), lambda: self.live.again(key))
        known = self._with_numbers(known)
        self.known.insert(0, known)
        return known.program

    def _with_numbers(self, known: Known) -> Known:
        """The program as its step is now: another where it reads other numbers at each call than before."""
        traced = self.live.of(known.key)
        if known.version != traced.version:
            planned = with_live_numbers(known.planned, traced, self._model, self._known_optimizer, known.micro_batch)
            program = self._bind(planned, self._outside(known.key))
            known = known._replace(planned=planned, program=program, version=traced.version)
        set_numbers(known.program, traced)
        return known

    def _make(self, key: Key, batch: Any, micro_batch: MicroBatch) -> Known:
        recorded = self._record(key, batch)
        planned = self._plan(key, recorded, micro_batch)
        # Planning has learnt which entries of its groups the optimizer changes itself.
        return Known(self._groups(), key, micro_batch, planned, self._bind(planned, recorded.outside))

    def _groups(self) -> OptimizerSignature | None:
        """What plans depend on of the optimizer."""
        return self._known_optimizer.signature() if self._known_optimizer is not None else None

    @property
    def updates_jointly(self) -> bool:
        """The optimizer updates all parameters in one `step()`, after the last gradient."""
        return self._known_optimizer is not None and bool(self._known_optimizer.habits.joint)

    def _plan(self, key: Key, recorded: Recorded, micro_batch: MicroBatch) -> Planned:
        largest = None
        if self._steps.accumulate > 1:
            largest = self._micro_batch(self._everything(recorded), True)
        with torch.random.fork_rng(), without_autocast():  # planning must not change what the user's generators give
            other = None if largest == micro_batch else largest
            return self._make_plan(None, recorded, micro_batch, other, self._away(key, micro_batch))

    def _outside(self, key: Key) -> Outside:
        recorded = self.live.of(key).recorded
        assert recorded is not None
        return recorded.outside

    def _bind(self, planned: Planned, outside: Outside) -> Program:
        offloading = self.offloading_for(planned)
        if self._late is not None:
            self._late.load(offloading, planned.slots)
        return bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self._model,
            self._optimizer,
            planned.slots,
            offloading,
            outside,
        )

    def _record(self, key: Key, batch: Any) -> Recorded:
        """Forward and backward, which the micro-batches of a signature share."""
        return self.live.recorded(key, batch)

    def _record_anew(self, batch: Any) -> Recorded:
        decisions, self._decisions = self._decisions, ()
        with torch.random.fork_rng(), self.tracing():
            recorded = record_step(
                self._model,
                batch,
                loss=self._steps.loss,
                objective=self._steps.objective,
                layouts=self.layouts(),
                decisions=decisions,
            )
        for notice in recorded.notices:
            self._say(notice)
        return recorded

    def tracing(self) -> AbstractContextManager[None]:
        """Modules are called whose weights may be below: a trace reads none."""
        return self.offloading.lending() if self.offloading is not None else nullcontext()

    def layouts(self) -> dict[str, torch.Tensor]:
        """How parameters lie that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        return late | (self.offloading.layouts() if self.offloading is not None else {})

    def _away(self, key: Key, micro_batch: MicroBatch) -> frozenset[str]:
        """What rests below between iterations under the plan of the update that this micro-batch leads to."""
        for known in self.known if not micro_batch.update else ():
            if known.micro_batch.update and known.key is key and known.optimizer == self._groups():
                slots = known.planned.slots
                return frozenset(s.name for s in slots if s.role != "temporary" and s.start == "below")
        return frozenset()

    def offloading_for(self, planned: Planned) -> Offloading | None:
        """One tier for all programs of the model, opened when the first plan needs it."""
        if self.offloading is None and planned.slots and self._lower is not None:
            tier = self._lower.open()
            limit = resident_limit(self._model, self._optimizer, planned.summary.device_budget_bytes)
            self.offloading = Offloading(tier, self._model, self._optimizer, limit)
        return self.offloading
