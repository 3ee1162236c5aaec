"""Loads a generated step and binds it to a model and an optimizer."""

from __future__ import annotations

import hashlib
import linecache
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from stowage.stages.device import current
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.trace import Constant, Value
from stowage.stages.runtime.active import ActiveUnits
from stowage.stages.runtime.dispatch import below_autograd
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.executors.verbs import Iteration
from stowage.stages.runtime.moves import Moves
from stowage.stages.runtime.observe.tracing import IterationRecorder
from stowage.stages.runtime.offload.lender import Lender
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.runtime.updates import PerParameterUpdates
from stowage.stages.runtime.whitelist import checked
from stowage.stages.structure import tensors_of
from stowage.stages.structure.tree import ModuleTree


def source_hash(source: str) -> str:
    """Return the hash that a plan's manifest states for its generated code."""
    return hashlib.sha256(source.encode()).hexdigest()


def load_step(
    source: str, expected_hash: str, filename: str, operators: Collection[str] = ()
) -> Callable[[Iteration], Any]:
    """Compile generated code, if it is what codegen wrote, and of nothing but what codegen writes.

    Args:
        source: the text of the step.
        expected_hash: the hash that the manifest states for the text.
        filename: the name under which tracebacks show the text.
        operators: the operators of the trace; see `whitelist.checked`.

    Raises:
        PlanMismatchError: the text's hash differs from the manifest's, or it holds something that no step has.
    """
    if source_hash(source) != expected_hash:
        raise PlanMismatchError(
            f"{filename} is not what codegen wrote (its hash differs from the manifest's): run `dvc repro` again."
        )
    module = checked(source, filename, operators)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"stowage_step_{expected_hash[:12]}"}
    exec(compile(module, filename, "exec"), namespace)
    step: Callable[[Iteration], Any] = namespace["step"]
    return step


def forget_source(filename: str) -> None:
    """Remove the text of a generated step that runs no more from what tracebacks can show."""
    linecache.cache.pop(filename, None)


def constant_tensors(
    constants: Sequence[Constant], values: Sequence[Value], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the constants of the trace as tensors, by name."""
    found: dict[str, torch.Tensor] = {}
    for constant in constants:
        value = values[constant.value]
        dtype = getattr(torch, value.dtype)
        flat = (
            torch.frombuffer(bytearray(constant.content), dtype=dtype)
            if constant.content
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        place = torch.device("cpu") if value.on_host else device
        found[value.source.removeprefix("constant:")] = flat.reshape(value.shape).to(place)
    return found


def _nothing() -> None:
    pass


MakeIteration = Callable[..., Iteration]
"""Makes the surroundings of a run; it is called with the keywords that `SingleIteration` takes."""


class Program:
    """Runs a generated step on a model.

    Attributes:
        updates: the per-parameter optimizer, or None when gradients stay in `.grad`.
        offloading: the lower tier of the model, or None.
        device: the device that the step runs on.
        recorder: records the steps of the next iteration, see `trace_iteration`.
        on_update: called with the name and the complete gradient of each parameter that is about to be updated.
        left: the tensors that the latest iteration leaves in the user's objects, until they are taken.
        numbers: by name, the numbers that generated code reads at each call.
        fresh: True if someone who shares the model's tree has just looked at it; holds for one call.
        constants_of: the table that the constants were made from, where they were replaced.
        updated: parameters that the latest iteration has updated so far.
        active: the units that train, where some may be frozen.
        moves: measures how far parameters move in updates; None where nobody asks.
        grad_norm: the global norm of the latest iteration's gradients before clipping; None without clipping.
        around: surrounds each run.
        arrange: called before each run, and before plain PyTorch runs to be compared with it.
        lender: lends weights that are not whole on the device to plain PyTorch; None where all are.
        elsewhere: returns what is in memory between iterations and belongs neither to the model nor to this program.
    """

    def __init__(
        self,
        step: Callable[[Iteration], Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        constants: dict[str, torch.Tensor],
        input_names: Sequence[str],
        slots: Sequence[Slot] = (),
        offloading: Offloading | None = None,
        outside: Mapping[str, torch.Tensor] | None = None,
        rooms: Mapping[str, torch.Tensor] | None = None,
        tree: ModuleTree | None = None,
        surroundings: MakeIteration = SingleIteration,
        units: Sequence[str] = (),
    ) -> None:
        """Bind the step; `surroundings` makes what each run of it sees."""
        self.active = ActiveUnits(units)
        self.moves: Moves | None = None
        self._step = step
        self._surroundings = surroundings
        self._rooms = rooms or {}
        self._tree = tree or ModuleTree(model)
        self.fresh = False
        self._constants = constants
        self._input_names = list(input_names)
        self._slots = list(slots)
        self.offloading = offloading
        self._outside = outside or {}
        parameters = self.parameters()
        if offloading is not None:
            offloading.adopt(parameters)
        self.updates = PerParameterUpdates(optimizer, parameters) if optimizer is not None else None
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.recorder: IterationRecorder | None = None
        self.on_update: Callable[[str, torch.Tensor], None] | None = None
        self._random = RandomStates(self.device)
        self.numbers: Mapping[str, Any] = {}
        self.constants_of: object = None
        self.grad_norm: torch.Tensor | None = None
        self.left: Sequence[torch.Tensor] = ()
        self.updated: list[str] = []
        self._taken: list[weakref.ref[torch.Tensor]] = []
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.arrange: Callable[[], None] = _nothing
        self.lender: Lender | None = offloading
        self.elsewhere: Callable[[], list[torch.Tensor]] = list

    def use_lower_tier(self, offloading: Offloading) -> None:
        """Find in the lower tier what plans offload that were made after this one, which uses none of it."""
        self.offloading = offloading
        offloading.adopt(self.parameters())
        self.lender = self.lender or offloading

    def take_left(self) -> Sequence[torch.Tensor]:
        """Return what the latest iteration leaves in the user's objects, which keep it from now on."""
        left, self.left = self.left, ()
        self._taken = [weakref.ref(tensor) for tensor in left]
        return left

    def parameters(self) -> dict[str, Any]:
        """Return the model's parameters, and those outside of it that the step reads."""
        met = {name: t for name, t in self._outside.items() if t.requires_grad and t.is_leaf}
        if not self.fresh:
            self._tree.look()
        return {**self._tree.parameters, **met}

    @property
    def staging_bytes(self) -> int:
        """Return the device memory that the lower tier needs for itself."""
        return self.offloading.tier.staging_bytes if self.offloading and self._slots else 0

    def resident(self) -> list[torch.Tensor]:
        """Return the tensors besides the model's that are in memory between iterations.

        They are constants, tensors outside of the model that the step reads and their gradients, what it has left in
        the user's objects, the latest norm of all gradients, and memory that reloads have taken.
        """
        outside = list(self._outside.values())
        gradients = [t.grad for t in outside if t.is_leaf and t.grad is not None]
        in_flight = self.offloading.in_flight() if self.offloading else []
        left = [tensor for tensor in (taken() for taken in self._taken) if tensor is not None]
        left += self.elsewhere()
        if self.grad_norm is not None:
            left.append(self.grad_norm)
        return [*self._constants.values(), *outside, *gradients, *in_flight, *left]

    def replace_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Replace the constants by others of the same shapes and dtypes."""
        self._constants = {name: constants.get(name, tensor) for name, tensor in self._constants.items()}

    def enter(self) -> None:
        """Put every parameter and state where the plan expects it between iterations; they stay there after each."""
        if self.offloading is not None:
            with self.around():
                self.offloading.enter(self._slots)

    def _update(self, name: str, gradient: torch.Tensor) -> None:
        if self.updates is None:
            raise PlanMismatchError(
                f"The plan updates parameter {name}, but no optimizer was given: plan with optimizer=None."
            )
        self._before(name)
        with self._measured(name):
            self.updates(name, gradient)
        self._after(name)

    def _measured(self, *names: str) -> AbstractContextManager[None]:
        if self.moves is None or self.updates is None:
            return nullcontext()
        return self.moves.of({name: self.updates.parameter(name) for name in names})

    def _before(self, *names: str) -> None:
        for name in names if self.offloading is not None else ():
            assert self.offloading is not None
            self.offloading.before_update(name)

    def _after(self, *names: str) -> None:
        for name in names if self.offloading is not None else ():
            assert self.offloading is not None
            self.offloading.changed(name)

    def _update_some(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self.updates is None:
            raise PlanMismatchError(
                f"The plan updates parameter {next(iter(gradients))}, but no optimizer was given: plan with "
                "optimizer=None."
            )
        self._before(*gradients)
        with self._measured(*gradients):
            self.updates.some(gradients)
        self._after(*gradients)

    def _update_all(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self.updates is None:
            raise PlanMismatchError("The plan updates all parameters, but no optimizer was given.")
        self._before(*gradients)
        with self._measured(*gradients):
            self.updates.together(gradients)
        self._after(*gradients)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run one iteration and return the loss."""
        loss: torch.Tensor = self._run(batch)
        return loss

    def forward(self, batch: Any) -> list[torch.Tensor]:
        """Run a program that is a forward alone, and return what it returns."""
        outputs: list[torch.Tensor] = self._run(batch)
        return outputs

    def _run(self, batch: Any) -> Any:
        with self.around():
            self.arrange()
            return self._iterate(batch)

    def _iterate(self, batch: Any) -> Any:
        tensors = tensors_of(batch)
        rooms = {
            name: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
            for name, like in self._rooms.items()
        }
        self.updated.clear()
        if self.offloading is not None:
            self.offloading.moves = self.moves
        run = self._surroundings(
            parameter=self.parameters(),
            buffer=self._tree.buffers,
            input=dict(zip(self._input_names, tensors, strict=True)),
            constant=self._constants,
            outside=ChainMap(rooms, self._outside),  # type: ignore[arg-type]
            random=self._random,
            update=self._update,
            update_some=self._update_some,
            update_all=self._update_all,
            offloading=self.offloading,
            recorder=self.recorder,
            on_update=self.on_update,
            number=self.numbers,
            updated=self.updated,
            active=self.active,
        )
        self.fresh = False
        self.enter()
        if self.updates is not None:
            self.updates.refresh()
        try:
            with current(self.device), below_autograd():
                result = self._step(run)
            if self.recorder is not None:
                self.recorder.end()
            self.grad_norm, self.left = run.grad_norm, run.left
            if self.offloading is not None:
                self.offloading.rest(self._slots)
            return result
        finally:
            self._random.clear()
