"""Compares planned steps with plain PyTorch: now and then the user's own forward runs beside the plan.

A plan holds for everything that the step read when it was traced. What has changed since then without anyone seeing it
shows in the loss: on a program's calls 1, 2, 4, 8, … model and loss also run in plain PyTorch, forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stowage.flows.api.check.agreement import AgreementHistory, close, digests, repeats, same_loss
from stowage.flows.api.check.all_ranks import on_all
from stowage.flows.api.check.observer import Observer
from stowage.flows.api.check.plain_step import PlainStep, first_difference, plain_step
from stowage.flows.api.check.when import Check
from stowage.flows.planning.planned import Planned
from stowage.stages.device import unique_bytes
from stowage.stages.device.heap import available_bytes
from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.errors import OffloadedError, size_text
from stowage.stages.ir.shadow import forward_bytes, forward_reads, workspaces
from stowage.stages.ir.updates import UPDATE_ALL
from stowage.stages.runtime import Program
from stowage.stages.runtime.observe.measure import resident_tensors
from stowage.stages.runtime.random.generators import STATE_BYTES, GeneratorStates, same_state
from stowage.stages.runtime.shadow.guard import NoRoom, ReadsOffloaded, Room
from stowage.stages.runtime.shadow.operators import Operators
from stowage.stages.runtime.shadow.shadow import Compute, Number, Shadow, ShadowSeen, digest
from stowage.stages.runtime.sharding.plain_forward import in_step
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.trace.recording.kernels_by_content import kernels_by_content
from stowage.stages.trace.requires_grad import requiring_no_gradients
from stowage.stages.workload.autocast import without_autocast

if TYPE_CHECKING:
    from stowage.flows.api.steps import KnownSteps

Result = TypeVar("Result")

AMPLE = 2
"""Multiple of all bytes a forward makes; with more room than this, no operator is checked before it runs."""

DRAWS = 2
"""Number of forwards in which a generator of Python must advance before the model is taken to advance it."""

COPIES = 3
"""Multiple of the bytes kept between iterations that a whole iteration of plain PyTorch needs to compare and undo."""


@dataclass
class _Watched(AgreementHistory):
    """A program that is checked, with what its check needs."""

    shadow: Shadow = field(kw_only=True)
    budget_bytes: int = field(kw_only=True)
    forward_bytes: int = field(kw_only=True)
    workspaces: dict[str, int] = field(kw_only=True)
    draws_later: bool = field(kw_only=True)
    jointly: bool = field(kw_only=True)
    by_training: bool = field(kw_only=True)
    """Its kernels depend on what trains, as plain PyTorch's do."""


class Net:
    """Compares one training step with plain PyTorch.

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
        ranks: Ranks | None = None,
        left_out: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Take what plain PyTorch runs: `compute` gives the loss of model and batch, and `roots` is what it calls.

        `ranks` train the model together, each on its own batches. `left_out` says which parameters are frozen now.
        """
        self._left_out = left_out
        self._ranks = ranks
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
        self, known: KnownSteps, batch: Any, work: Callable[[], Result], loss_of: Callable[[Result], torch.Tensor]
    ) -> Result:
        """Run `work`, which runs the program once, outside of autocast; before it, where that is due, plain PyTorch.

        Raises:
            StaleStep: the results differ.
        """
        program = known.program
        watched = self._watched.get(program) or self._watch(program, known.planned, self._loss_shadow)
        watched.calls += 1
        if not self._is_due(watched.calls):
            with without_autocast():
                return work()
        everything = self.check == "gradients" and watched.calls == 1
        if everything and not known.planned.summary.exact:
            self._say("Gradients are not compared with plain PyTorch's, since this plan may change them; the loss is.")
            everything = False
        whole = self._whole(watched, known, batch) if everything else None
        program.fresh = False  # the model is called first, and may change itself
        program.enter()
        seen = self._plain_on_all(program, watched, batch)
        summary = known.planned.summary
        has_room = summary.device_peak_bytes + STATE_BYTES <= summary.device_budget_bytes
        observer = Observer(program, whole, has_room=has_room)
        program.on_update = observer.on_update if seen is not None or whole is not None else None
        try:
            with without_autocast():
                result = work()
        finally:
            program.on_update = None

        def compare() -> None:
            if seen is not None:
                self._compare(program, watched, batch, seen, Number.of(loss_of(result)), observer)
            if whole is not None:
                self._compare_all(watched, known, whole, observer)

        on_all(self._ranks, compare)
        if seen is not None:
            watched.agreed = watched.calls
        return result

    def run_forward(
        self, program: Program, planned: Planned, batch: Any, forward: Compute, work: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Run `work`, a forward-only program, outside of autocast; before it, where due, `forward` in plain PyTorch.

        Raises:
            StaleStep: the results differ.
        """
        watched = self._watched.get(program) or self._watch(
            program,
            planned,
            lambda reads: Shadow(
                self._model, forward, (), self._operators, reads, digests, gradients=False, kernels=kernels_by_content
            ),
        )
        watched.calls += 1
        seen = None
        due = self._is_due(watched.calls) and repeats(program.device)
        if due:
            program.enter()
            seen = self._plain_on_all(program, watched, batch)
        with without_autocast():
            result = work()

        def compare() -> None:
            found = digests(result)
            expected = seen.result if seen is not None else found
            wrong = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), None)
            if wrong is not None or len(found) != len(expected):
                raise watched.stale_evaluation(wrong or 0)

        if due:
            on_all(self._ranks, compare)
        if seen is not None:
            watched.agreed = watched.calls
        return result

    def _loss_shadow(self, reads: dict[str, frozenset[str]]) -> Shadow:
        return Shadow(self._model, self._compute, self._roots, self._operators, reads, kernels=kernels_by_content)

    def _is_due(self, call: int) -> bool:
        if self.check == "never":
            return False
        return self.check == "always" or not call & (call - 1)

    def _watch(
        self, program: Program, planned: Planned, shadow: Callable[[dict[str, frozenset[str]]], Shadow]
    ) -> _Watched:
        trace = planned.trace
        found = self._watched[program] = _Watched(
            shadow=shadow(forward_reads(trace)),
            budget_bytes=planned.summary.device_budget_bytes,
            forward_bytes=forward_bytes(trace),
            workspaces=workspaces(trace, planned.nodes),
            draws_later=any(c.is_random and c.phase != "forward" for c in trace.calls),
            jointly=any(c.target == UPDATE_ALL for c in trace.calls),
            by_training=any(c.target in BY_TRAINING for c in trace.calls),
        )
        return found

    def _plain_on_all(self, program: Program, watched: _Watched, batch: Any) -> ShadowSeen | None:
        """Return the results of plain PyTorch here; None where they cannot be computed on one of the ranks now."""
        program.arrange()
        return in_step(self._ranks, lambda: self._plain(program, watched, batch))

    def _plain(self, program: Program, watched: _Watched, batch: Any) -> ShadowSeen | None:
        """Return the results of plain PyTorch; None where they cannot be computed now, so that the check waits."""
        resident_bytes = unique_bytes([*resident_tensors(self._model, self._optimizer, batch), *program.resident()])
        free = watched.budget_bytes - resident_bytes - program.staging_bytes
        most = watched.forward_bytes + max(watched.workspaces.values(), default=0)
        room = Room(free, free > AMPLE * most, watched.workspaces)
        try:
            with requiring_no_gradients(self._frozen(program) if watched.by_training else ()):
                return watched.shadow.run(batch, room, program.lender)
        except NoRoom as error:
            self._waits(
                f"its forward takes at least {size_text(error.nbytes)} beside what is in memory, and the budget has "
                f"{size_text(max(free, 0))} for it; a plan that changes unseen is noticed with a larger budget alone"
            )
        except ReadsOffloaded as error:
            self._waits(f"'{error.name}' is offloaded and is read outside of every module that is known to read it")
        except OffloadedError as error:
            self._waits(str(error).rstrip("."))
        return None

    def _frozen(self, program: Program) -> list[torch.Tensor]:
        """Return the parameters that are frozen now, as model and loss find them."""
        parameters = {**program.parameters(), **dict(self._model.named_parameters())}
        return [parameters[name] for name in self._left_out()]

    def _whole(self, watched: _Watched, known: KnownSteps, batch: Any) -> PlainStep | None:
        """Return the results of a whole iteration of plain PyTorch; None where there is no memory for it."""
        program, micro_batch = known.program, known.micro_batch
        parameters = program.parameters()
        states = resident_tensors(self._model, self._optimizer, ())
        needed = known.planned.eager_peak_bytes + COPIES * unique_bytes(states)
        if needed > _available_bytes(program.device):
            self._say(
                f"Gradients are not compared with plain PyTorch's: that takes about {size_text(needed)}, which this "
                "machine does not have; the loss is."
            )
            return None
        if program.offloading is not None:
            program.offloading.fetch_all()  # the program offloads again what its plan keeps offloaded
        return plain_step(
            self._model,
            self._optimizer if micro_batch.update else None,
            self._compute,
            batch,
            self._roots,
            parameters=parameters,
            max_grad_norm=micro_batch.max_grad_norm,
            left_out=self._left_out(),
            frozen=watched.by_training,
        )

    def _waits(self, reason: str) -> None:
        """Say once that the check waits, and why."""
        if reason not in self._said:
            self._said.add(reason)
            self._say(f"The comparison with plain PyTorch waits: {reason}.")

    def _compare(
        self, program: Program, watched: _Watched, batch: Any, seen: ShadowSeen, loss: Number, observer: Observer
    ) -> None:
        device = program.device
        if not same_loss(loss, seen.result, device):
            raise watched.stale_step(f"gave the loss {loss.text}, plain PyTorch gives {seen.result.text}")
        name = seen.generators.difference(observer.generators)
        drawn = watched.draws_later or (watched.jointly and observer.late)
        if name is not None and (
            not drawn if name.startswith("PyTorch") else self._draws(program, watched, batch, name)
        ):
            why = (
                "not so many random numbers are drawn as when it was traced"
                if name.startswith("PyTorch")
                else "the model or the loss draws from it, which a plan does not repeat, so draw with torch.rand"
            )
            raise watched.stale_step(f"left {name} elsewhere than plain PyTorch does", why)
        for name, buffer in self._model.named_buffers() if repeats(device) else ():
            if name in seen.buffers and digest(buffer) != seen.buffers[name]:
                raise watched.stale_step(f"left something else in buffer '{name}' than plain PyTorch does")

    def _draws(self, program: Program, watched: _Watched, batch: Any, name: str) -> bool:
        """Return whether model and loss advance a generator of Python, rather than another thread."""
        if self._ranks is not None:
            return False  # the forwards that would tell gather weights, and other ranks may have seen nothing
        for _ in range(DRAWS):
            before = GeneratorStates.now(program.device)
            program.enter()
            program.arrange()
            seen = self._plain(program, watched, batch)
            if seen is not None and same_state(seen.generators.states[name], before.states[name]):
                return False
        return True

    def _compare_all(self, watched: _Watched, known: KnownSteps, whole: PlainStep, observer: Observer) -> None:
        optimizer = self._optimizer if known.micro_batch.update else None
        if observer.wrong:
            what: str | None = f"another gradient of parameter '{observer.wrong[0]}' than plain PyTorch"
        else:
            program = known.program
            what = first_difference(whole, self._model, optimizer, program.offloading, program.parameters(), close)
        if what is not None:
            raise watched.stale_step(
                f"gave {what}",
                "either something that it reads has changed since it was planned, or this is a fault of Stowage, to be "
                "reported with the model",
            )


def _available_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
