"""Programs of one model: the one for a batch and for the gradients that wait, planned when it first appears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from stowage.flows._planned import Planned
from stowage.flows._tiers import LowerTier
from stowage.flows._true_kernels import with_true_kernels
from stowage.flows._weights import LateWeights
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.resident import resident_limit
from stowage.stages.trace import Left, MicroBatch, Outside, Recorded, parameters_of, record_step
from stowage.stages.workload import BatchSignature, ModelSignature, batch_signature, model_signature
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.calls import Loss, Objective

Key = tuple[BatchSignature, ModelSignature]
Say = Callable[[str], None]
MakePlan = Callable[[Any, Recorded, MicroBatch, MicroBatch | None, frozenset[str]], Planned]


@dataclass(frozen=True)
class Steps:
    """What every program of a model shares.

    Attributes:
        loss, objective: see `record_step`.
        accumulate: micro-batches of an update.
        max_grad_norm: of clipping, or None.
    """

    loss: Loss | None = None
    objective: Objective | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None


class Known(NamedTuple):
    """A program, what it is for, the tensors that it reads outside of model and batch, by name, and what it leaves."""

    key: Key
    micro_batch: MicroBatch
    planned: Planned
    program: Program
    outside: Outside
    left: Left

    def stands(self) -> bool:
        """Whether what is outside of model and batch is as it was traced, in kind."""
        return self.outside.differs() is None and self.left.stands()


class Programs:
    """Finds programs, and makes what it does not find.

    Attributes:
        known: programs, the one found last first.
        offloading: the tier below the device, once a plan has used it.
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
        self._make_plan = make_plan
        self._steps = steps
        self._late = late
        self._lower = lower
        self._say = say
        self.known: list[Known] = []
        self._recorded: tuple[Key, Recorded] | None = None
        self._decisions: dict[Key, tuple[bool, ...]] = {}
        self.offloading: Offloading | None = None

    @property
    def latest(self) -> Known | None:
        """What was found last."""
        return self.known[0] if self.known else None

    def key(self, batch: Any) -> Key:
        """What a program is valid for."""
        return batch_signature(batch), model_signature(self._model)

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
        known = next((k for k in self.known if k.key == key and k.stands()), None)
        outside = known.outside if known is not None else self._record(key, batch).outside
        return parameters_of(self._model, outside)

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
        self._recorded = None
        self.known = [k for k in self.known if program is not None and k.program is not program]

    def leave(self, program: Program) -> None:
        """Put what the program's latest iteration leaves where the user's forward and loss leave it."""
        known = next((k for k in self.known if k.program is program), None)
        tensors = program.take_left()
        if known is None or not known.left.effects:
            return
        decided = known.left.decided(tensors)
        if decided is None:
            known.left.apply(tensors)
            return
        self._decisions[known.key] = decided
        self.forget(program)
        self._say(
            "What this step leaves in your objects depends on a tensor's value, which was another one than when the step "
            "was traced: it is left out once, and traced again for the next step."
        )

    def _forget_record(self) -> None:
        self._recorded = None

    def _micro_batch(self, waiting: frozenset[str], update: bool) -> MicroBatch:
        update = update and self._optimizer is not None
        return MicroBatch(waiting, update, self._steps.max_grad_norm if update else None)

    @staticmethod
    def _everything(recorded: Recorded) -> frozenset[str]:
        """Parameters that get a gradient."""
        return frozenset(g.parameter for g in recorded.gradients if g.gradient_value >= 0)

    def _find(self, key: Key, batch: Any, micro_batch: MicroBatch) -> Program:
        for position, known in enumerate(self.known):
            if known.micro_batch == micro_batch and known.key == key and known.stands():
                if position:
                    self.known.insert(0, self.known.pop(position))
                return known.program
        known = with_true_kernels(lambda: self._make(key, batch, micro_batch), self._forget_record)
        self.known.insert(0, known)
        return known.program

    def _make(self, key: Key, batch: Any, micro_batch: MicroBatch) -> Known:
        recorded = self._record(key, batch)
        largest = None
        if self._steps.accumulate > 1:
            largest = self._micro_batch(self._everything(recorded), True)
        with torch.random.fork_rng(), without_autocast():  # planning must not change what the user's generators give
            other = None if largest == micro_batch else largest
            planned = self._make_plan(batch, recorded, micro_batch, other, self._away(key, micro_batch))
        offloading = self.offloading_for(planned)
        if self._late is not None:
            self._late.load(offloading, planned.slots)
        program = bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self._model,
            self._optimizer,
            planned.slots,
            offloading,
            recorded.outside,
        )
        return Known(key, micro_batch, planned, program, recorded.outside, recorded.left)

    def _record(self, key: Key, batch: Any) -> Recorded:
        """Forward and backward; the micro-batches of a signature share the record of the latest."""
        if self._recorded is None or self._recorded[0] != key or not self._recorded[1].stands():
            with torch.random.fork_rng():
                recorded = record_step(
                    self._model,
                    batch,
                    loss=self._steps.loss,
                    objective=self._steps.objective,
                    layouts=self.layouts(),
                    decisions=self._decisions.get(key, ()),
                )
            for notice in recorded.notices:
                self._say(notice)
            self._recorded = (key, recorded)
        return self._recorded[1]

    def layouts(self) -> dict[str, torch.Tensor]:
        """How parameters lie that are not in memory."""
        late = self._late.layouts if self._late is not None else {}
        return late | (self.offloading.layouts() if self.offloading is not None else {})

    def _away(self, key: Key, micro_batch: MicroBatch) -> frozenset[str]:
        """What rests below between iterations under the plan of the update that this micro-batch leads to."""
        for known in self.known if not micro_batch.update else ():
            if known.micro_batch.update and known.key == key:
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
