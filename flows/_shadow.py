"""The net under a planned step: now and then the user's own forward runs beside it, and the numbers are compared.

A plan holds for everything that the step read when it was traced. What has changed since then without anyone seeing it
shows in the loss: on a program's calls 1, 2, 4, 8, … model and loss also run in plain PyTorch, forward only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stowage.flows._planning import Planned
from stowage.stages.device import unique_bytes
from stowage.stages.ir.errors import AwayError, ParameterError, StaleStep, mib
from stowage.stages.ir.shadow import forward_bytes, forward_reads, workspaces
from stowage.stages.runtime import Program
from stowage.stages.runtime.generators import GeneratorStates
from stowage.stages.runtime.measure import resident_tensors
from stowage.stages.runtime.shadow import Compute, Number, Seen, Shadow, digest
from stowage.stages.runtime.shadow_guard import NoRoom, Operators, ReadsAway, Room
from stowage.stages.workload.autocast import without_autocast

Check = Literal["powers", "always", "never", "gradients"]
Result = TypeVar("Result")

AMPLE = 2
"""Times what a forward makes in all: with so much room no operator is looked at before it runs."""

REPEATABLE = 32
"""Where kernels of a GPU need not repeat their bits, losses are equal within so many roundings."""


def check_of(value: Any) -> Check:
    """The argument `check`, or `ParameterError`."""
    if value not in get_args(Check):
        raise ParameterError(
            f"check is {value!r}: give 'powers' (calls 1, 2, 4, 8, …), 'always', 'never' or 'gradients'."
        )
    found: Check = value
    return found


@dataclass
class _Watched:
    """A program under the net: its calls so far, and the latest one that was compared and agreed."""

    shadow: Shadow
    budget_bytes: int
    forward_bytes: int
    workspaces: dict[str, int]
    draws_later: bool
    calls: int = 0
    agreed: int = 0


class Net:
    """Of one training step.

    Attributes:
        check: when plain PyTorch runs beside the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        compute: Compute,
        roots: tuple[Any, ...],
        check: Check,
        say: Callable[[str], None],
    ) -> None:
        """`compute`: from the model and the batch to the loss; `roots`: what it calls."""
        self.check = check
        self._model = model
        self._optimizer = optimizer
        self._compute = compute
        self._roots = roots
        self._say = say
        self._watched: WeakKeyDictionary[Program, _Watched] = WeakKeyDictionary()
        self._operators = Operators()
        self._said: set[str] = set()

    def run(
        self,
        program: Program,
        planned: Planned,
        batch: Any,
        work: Callable[[], Result],
        loss_of: Callable[[Result], torch.Tensor],
    ) -> Result:
        """`work`, which runs the program once, outside of autocast; before it, where that is due, plain PyTorch.

        Raises:
            StaleStep: they differ.
        """
        watched = self._watched.get(program) or self._watch(program, planned)
        watched.calls += 1
        if not self._is_due(watched.calls):
            with without_autocast():
                return work()
        program.enter()
        seen = self._plain(program, watched, batch)
        before_updates: list[GeneratorStates] = []
        if seen is not None:
            program.before_updates = lambda: before_updates.append(GeneratorStates.now(program.device))
        try:
            with without_autocast():
                result = work()
        finally:
            program.before_updates = None
        if seen is not None:
            left = before_updates[0] if before_updates else GeneratorStates.now(program.device)
            self._compare(watched, seen, Number.of(loss_of(result)), left, program.device)
            watched.agreed = watched.calls
        return result

    def _is_due(self, call: int) -> bool:
        if self.check == "never":
            return False
        return self.check == "always" or not call & (call - 1)

    def _watch(self, program: Program, planned: Planned) -> _Watched:
        trace = planned.trace
        found = self._watched[program] = _Watched(
            Shadow(self._model, self._compute, self._roots, self._operators, forward_reads(trace)),
            planned.summary.device_budget_bytes,
            forward_bytes(trace),
            workspaces(trace, planned.nodes),
            any(c.is_random and c.phase != "forward" for c in trace.calls),
        )
        return found

    def _plain(self, program: Program, watched: _Watched, batch: Any) -> Seen | None:
        """What plain PyTorch gives; None where it cannot be known here and now, and the check waits."""
        held = unique_bytes([*resident_tensors(self._model, self._optimizer, batch), *program.held()])
        free = watched.budget_bytes - held - program.staging_bytes
        most = watched.forward_bytes + max(watched.workspaces.values(), default=0)
        room = Room(free, free > AMPLE * most, watched.workspaces)
        try:
            return watched.shadow.run(batch, room, program.offloading)
        except NoRoom as error:
            self._waits(
                f"its forward takes at least {mib(error.nbytes)} beside what is in memory, and the budget has "
                f"{mib(max(free, 0))} for it; a plan that changes unseen is noticed with a larger budget alone"
            )
        except ReadsAway as error:
            self._waits(
                f"'{error.name}' is below the device and is read outside of every module that is known to read it"
            )
        except AwayError as error:
            self._waits(str(error).rstrip("."))
        return None

    def _waits(self, reason: str) -> None:
        """Say so once."""
        if reason not in self._said:
            self._said.add(reason)
            self._say(f"The comparison with plain PyTorch waits: {reason}.")

    def _compare(
        self, watched: _Watched, seen: Seen, loss: Number, generators: GeneratorStates, device: torch.device
    ) -> None:
        if not _equal(loss, seen.loss, device):
            raise self._stale(
                watched,
                f"gave the loss {loss.text}, plain PyTorch gives {seen.loss.text}",
                "something that the step reads has changed where Stowage cannot see it (a number that a library or a "
                "file holds, a global, an environment variable): pass it in the batch, as a tensor or a number",
            )
        name = seen.generators.difference(generators)
        if name is not None and not (watched.draws_later and name.startswith("PyTorch")):
            draw = (
                "as many random numbers are not drawn as when the step was traced"
                if name.startswith("PyTorch")
                else "the model or the loss draws from it, which a plan does not repeat: draw with torch.rand"
            )
            raise self._stale(watched, f"left {name} elsewhere than plain PyTorch does", draw)
        for name, buffer in self._model.named_buffers():
            if name in seen.buffers and digest(buffer) != seen.buffers[name]:
                raise self._stale(
                    watched,
                    f"left another content in buffer '{name}' than plain PyTorch does",
                    "something that the step reads has changed where Stowage cannot see it: pass it in the batch, as a "
                    "tensor or a number",
                )

    @staticmethod
    def _stale(watched: _Watched, what: str, why: str) -> StaleStep:
        since = (
            f"since some call after number {watched.agreed} and at the latest this one, number {watched.calls}"
            if watched.agreed
            else f"on call number {watched.calls}, the first that is compared"
        )
        return StaleStep(
            f"The planned step {what}, {since}: {why}; weights have been updated with the stale step, so go back to "
            "what was saved before, and the next call plans anew.",
            watched.calls,
            watched.agreed,
        )


def _equal(loss: Number, plain: Number, device: torch.device) -> bool:
    if loss.dtype != plain.dtype:
        return False
    if loss.bits == plain.bits or device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return loss.bits == plain.bits
    bound = REPEATABLE * torch.finfo(loss.dtype).eps * max(abs(loss.value), abs(plain.value))
    return math.isfinite(bound) and abs(loss.value - plain.value) <= bound
