"""What generated code calls to move tensors between the device and the tier below it: offload, reload, wait, free.

A parameter or state that is not on the device keeps its shape and dtype; its memory is one number, NaN (0 where the
dtype has none), and who reads it is told so (`away`). So nothing can quietly train on what is not there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from stowage.stages.device.events import RELEASE
from stowage.stages.device.heap import ResidentLimit
from stowage.stages.device.tiers import HostMemory, Tier, Transfer
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import DISK_ALIGNMENT_BYTES
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.updates import gradient_slot, is_gradient_slot
from stowage.stages.runtime.clipping import apply_scale
from stowage.stages.runtime.files.weights import absent
from stowage.stages.runtime.offload.absence import Absent
from stowage.stages.runtime.offload.away import arrive, leave
from stowage.stages.runtime.offload.cpu_updates import Tensors, UpdatesBelow, bring_counters
from stowage.stages.runtime.offload.state_dicts import guard_module, guard_optimizer

Form = tuple[Sequence[int], Sequence[int], int]
"""Shape, strides and offset of a view, in elements."""


@dataclass(frozen=True)
class _UnderWay:
    direction: Literal["offloading", "reloading"]
    transfer: Transfer
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Layout:
    """What a tensor looks like when it is away."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Layout:
        return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self, alignment: int = 0) -> torch.Tensor:
        """Memory for it; on the CPU with an address that `alignment` divides."""
        if not alignment or self.device.type != "cpu":
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if all(self.shape) else 0
        memory = torch.empty(span * self.dtype.itemsize + alignment, dtype=torch.uint8, device="cpu").untyped_storage()
        start = -memory.data_ptr() % alignment
        part: Any = memory[start : start + span * self.dtype.itemsize]
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(part, 0, self.shape, self.stride)

    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Offloading:
    """The tier below the device, for one model and its optimizer.

    Optimizer states that do not exist yet (before the first update) need no memory: moving them does nothing.
    """

    def __init__(
        self,
        tier: Tier,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: ResidentLimit | None = None,
    ) -> None:
        """`resident`: what the process may occupy, where the device is its own memory."""
        self.tier = tier
        self._resident = resident
        self._alignment = tier.memory_alignment if tier.memory_alignment <= DISK_ALIGNMENT_BYTES else 0
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._slots: dict[str, Slot] = {}
        self._room: dict[str, int] = {}
        self._at: dict[str, str] = {}
        self._absent = Absent()
        self._family: dict[str, list[str]] = {}
        self._layouts: dict[str, _Layout] = {}
        self._below: set[str] = set()
        self._copied: set[str] = set()
        self._under_way: dict[str, _UnderWay] = {}
        self._updating: dict[str, Future[dict[str, Any]]] = {}
        self._updates: UpdatesBelow | None = None
        self._counted_below: set[str] = set()
        self._stands_for: dict[str, torch.Tensor] = {}
        self._update_times: list[tuple[str, float, float]] = []
        self._raw = False
        self._verbs = 0
        """How often something was moved, or found out of date: what may end a rest."""
        self._settled: Sequence[Slot] | None = None
        self._rest: tuple[Sequence[Slot], int] | None = None
        guard_module(model, self._absent.within)
        if optimizer is not None:
            guard_optimizer(optimizer, self._first_state_away)

    def adopt(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Parameters outside of the model that a step reads may leave too."""
        self._parameters.update(parameters)  # type: ignore[arg-type]

    def allow(self, more_bytes: int) -> None:
        """The budget has grown."""
        if self._resident is not None:
            self._resident.limit_bytes += more_bytes

    def _tensor(self, name: str) -> torch.Tensor | None:
        """A parameter; a state, or a gradient that waits, if it exists."""
        held = self._parameters.get(name)
        if held is not None:
            return held
        parameter, _, state = name.partition("::")
        if is_gradient_slot(name):
            return self._parameters[parameter].grad
        assert self._optimizer is not None
        found: Any = self._optimizer.state.get(self._parameters[parameter], {}).get(state)
        return found if isinstance(found, torch.Tensor) else None

    def populate(self, tensors: Iterable[tuple[str, torch.Tensor]], slots: Sequence[Slot]) -> None:
        """Give parameters their first values, one after the other, each at once where `slots` want it."""
        self._reserve(slots)
        by_name = {s.name: s for s in slots}
        for name, tensor in tensors:
            self._parameters[name].data = tensor
            if name in by_name:
                self._place(by_name[name])

    def layouts(self) -> dict[str, torch.Tensor]:
        """Of parameters below, as tensors on the meta device: what a trace needs of them."""
        return {n: self._layouts[n].meta() for n in self._below if n in self._parameters}

    def _reserve(self, slots: Sequence[Slot]) -> None:
        """Room for each. Activations of another batch's program have the same names, and other sizes: the largest has
        room for the others, which nothing holds between iterations."""
        spent: list[str] = []
        for slot in slots:
            place = self._at.setdefault(slot.name, slot.name)
            if self._room.get(place, slot.nbytes) < slot.nbytes:
                self._at[slot.name] = f"{slot.name} of {slot.nbytes} bytes"
                if slot.role == "temporary":
                    spent.append(place)
            if slot.name not in self._slots:
                self._family.setdefault(slot.name.partition("::")[0], []).append(slot.name)
        if spent:
            self.tier.release(spent)
            for place in spent:
                del self._room[place]
        fresh = {self._at[s.name]: s.nbytes for s in slots if self._at[s.name] not in self._room}
        if fresh:
            on_disk = [self._at[s.name] for s in slots if s.home == "disk" and self._at[s.name] in fresh]
            self.tier.reserve(fresh, on_disk)
            self._room.update(fresh)
        self._slots.update({s.name: s for s in slots})

    def enter(self, slots: Sequence[Slot]) -> None:
        """Before an iteration: put every parameter and state where its plan expects it.

        After an iteration of the same plan they are there already; where that was seen once, and nothing was touched
        since it ended, it is not looked at again.
        """
        if self._rest is not None and self._rest[0] is slots and self._rest[1] == self._verbs:
            return
        verbs = self._verbs
        self._reserve(slots)
        persistent = [s for s in slots if s.role != "temporary"]
        planned = {s.name for s in persistent}
        for slot in persistent:
            if slot.start in ("below", "updating"):  # what leaves makes room for what comes
                self._place(slot)
        self._forget_gradients()
        for name in sorted((self._below | set(self._under_way)) - planned):
            if not is_gradient_slot(name):  # it comes when it is asked for
                self.fetch(name)
        for slot in persistent:
            self._place(slot)
        in_place = verbs == self._verbs and all(self._tensor(name) is not None for name in planned)
        self._settled = slots if in_place and not any(map(is_gradient_slot, planned)) else None

    def rest(self, slots: Sequence[Slot]) -> None:
        """An iteration that began with `enter` has ended as its plan says."""
        self._rest = (slots, self._verbs) if self._settled is slots else None

    def _forget_gradients(self) -> None:
        """Those that someone has dropped meanwhile, as `zero_grad` does."""
        for name in [n for n in self._below | self._copied if is_gradient_slot(n)]:
            if self._tensor(name) is None:
                self._below.discard(name)
                self._copied.discard(name)

    def keep_gradient(self, parameter: str) -> None:
        """A gradient has gone down for good: something that stands for it waits in `.grad`."""
        self._verbs += 1
        name, held = gradient_slot(parameter), self._parameters[parameter]
        held.grad = self._stand_in(name, held.device)
        self._below.add(name)

    def _stand_in(self, name: str, device: torch.device) -> torch.Tensor:
        nothing = absent(self._layouts[name].meta(), device)
        leave(nothing, name)
        return nothing

    def _place(self, slot: Slot) -> None:
        name, start = slot.name, slot.start
        if self.where(name) == "device" and (start == "reloading" or (start == "offloading" and name in self._copied)):
            start = "device"  # what the plan has under way is done
        if self._tensor(name) is None or (self.where(name) == start and (not slot.copied or name in self._copied)):
            return
        self._settle(name)
        if (slot.copied or start in ("below", "reloading", "updating")) and name not in self._copied:
            self.offload(name)
            self.wait(name)
        if start in ("below", "reloading", "updating") and name not in self._below:
            self.free(name)
        if start in ("device", "offloading"):
            self.fetch(name)
        if start == "offloading":
            self.offload(name)
        if start == "reloading":
            self.reload(name)

    def where(self, name: str) -> str:
        """As `Slot.start` says it."""
        if name in self._under_way:
            return self._under_way[name].direction
        if name in self._updating:
            return "updating"
        return "below" if name in self._below else "device"

    def _settle(self, name: str) -> None:
        if name.partition("::")[0] in self._updating:
            self._updated(name.partition("::")[0])
        if name in self._under_way:
            self.wait(name)

    def fetch(self, name: str) -> None:
        """Bring a parameter or state to the device and wait."""
        self._settle(name)
        if name in self._below:
            self.reload(name)
            self.wait(name)

    def fetch_all(self, names: Iterable[str] | None = None) -> list[str]:
        """Bring parameters and states to the device, whatever the budget: by default all, whose names are returned."""
        self.settle_all()
        wanted = sorted(self._slots) if names is None else list(names)
        for name in wanted:
            self.fetch(name)
        return wanted

    def serves(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether it is this optimizer whose states it moves."""
        return optimizer is self._optimizer

    def serve(self, optimizer: torch.optim.Optimizer | None) -> None:
        """From now on for another optimizer of the same parameters."""
        self._verbs += 1
        self.forget_states()
        if optimizer is not None and optimizer is not self._optimizer:
            guard_optimizer(optimizer, self._first_state_away)
        self._optimizer = optimizer
        self._updates = None

    def _first_state_away(self, optimizer: torch.optim.Optimizer) -> str | None:
        if optimizer is not self._optimizer or self._raw:
            return None
        return next((n for n in sorted(self._below) if "::" in n and not is_gradient_slot(n)), None)

    @contextlib.contextmanager
    def raw_states(self) -> Iterator[None]:
        """The optimizer's `state_dict` gives what stands for its states."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def update(self, parameter: str, gradient: str, scale: str | None = None, form: Form | None = None) -> None:
        """Start the update of a parameter by the CPU; see `UpdatesBelow`. A scale clips the gradient where it is.

        Args:
            parameter, gradient, scale: names of their places.
            form: of the gradient, if it is a view of what is in its place.
        """
        if self._updates is None:
            assert self._optimizer is not None
            self._updates = UpdatesBelow(self._optimizer)
        self._verbs += 1
        held = self._parameters[parameter]
        if is_gradient_slot(gradient):  # it waited in `.grad`
            held.grad = None
            self._below.discard(gradient)
            self._copied.discard(gradient)
        known: dict[str, Any] = self._optimizer.state.get(held, {}) if self._optimizer is not None else {}
        below = {k for k in known if f"{parameter}::{k}" in self._below}

        def tensors() -> Tensors:
            state = {k: self._content(f"{parameter}::{k}") if k in below else v for k, v in known.items()}
            found = self._content(gradient)
            if form is not None:
                shape, stride, offset = form
                found = found.as_strided(shape, stride, found.storage_offset() + offset)
            content = self._content(parameter), found, state
            clipped_by = self._content(scale) if scale is not None else None
            began.append(time.perf_counter())
            if clipped_by is not None:
                apply_scale([content[1]], clipped_by)
            return content

        def keep(weight: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
            memory = cast(HostMemory, self.tier)
            memory.keep(parameter, weight)
            left = dict(state)
            for key in [k for k in state if f"{parameter}::{k}" in self._slots]:
                memory.keep(f"{parameter}::{key}", left[key])
                left[key] = _Layout.of(left[key])
            return left

        def ended(update: Future[dict[str, Any]]) -> None:
            if began:
                self._update_times.append((parameter, began[0], time.perf_counter()))

        began: list[float] = []
        self._updating[parameter] = self._updates.start(held, tensors, keep)
        if self.tier.record:
            self._updating[parameter].add_done_callback(ended)

    def _content(self, name: str) -> torch.Tensor:
        """The tensor that lives in a slot."""
        memory = cast(HostMemory, self.tier)
        return memory.content(self._at[name], self._layouts[name].meta())

    def _updated(self, parameter: str) -> None:
        """Take over what the update made: new states find their place below."""
        assert self._optimizer is not None
        held = self._parameters[parameter]
        for key, value in self._updating.pop(parameter).result().items():
            name = f"{parameter}::{key}"
            if not isinstance(value, _Layout):
                self._optimizer.state[held][key] = value
                continue
            if name not in self._below:
                self._layouts[name] = replace(value, device=held.device)
                self._optimizer.state[held][key] = self._stand_in(name, held.device)
                self._below.add(name)
            self._copied.add(name)
        self._copied.add(parameter)
        self._counted_below.add(parameter)

    def before_update(self, parameter: str) -> None:
        """An update on the device is next."""
        if parameter in self._counted_below:
            assert self._optimizer is not None
            bring_counters(self._optimizer, self._parameters[parameter])
            self._counted_below.discard(parameter)

    def away(self) -> dict[int, str]:
        """Of parameters and states that are below alone: identity of the tensor that stands for it -> name."""
        self.settle_all()
        return {id(tensor): name for name in self._below if (tensor := self._tensor(name)) is not None}

    def peek(self, name: str) -> torch.Tensor:
        """What is below, in new device memory; where it lives does not change."""
        tensor = self._layouts[name].empty()
        self.tier.reload(self._at[name], tensor).wait()
        return tensor

    def below(self) -> dict[str, torch.Tensor]:
        """Parameters that are below alone, by name: what stands for them."""
        self.settle_all()
        return {name: self._parameters[name] for name in sorted(self._below) if name in self._parameters}

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Modules may be called whatever is below: who calls them brings what they read (`peek`)."""
        lent = list(self.below().values())
        self._verbs += 1
        self._absent.lending = True
        for tensor in lent:
            arrive(tensor)
        try:
            yield
        finally:
            self._absent.lending = False
            for name, tensor in self.below().items():
                leave(tensor, name)

    def like(self, name: str) -> torch.Tensor:
        """Shape, strides and dtype of a parameter or state as a tensor on the meta device, wherever its content is."""
        if name in self._below:
            return self._layouts[name].meta()
        held = self._tensor(name)
        assert held is not None
        return _Layout.of(held).meta()

    def make_room(self, nbytes: int) -> None:
        """Send down what has a slot, until `nbytes` more are not above what the plan has here between iterations.

        Where everything is sent down and that is not enough, `nbytes` are those of one tensor, which the plan brings
        here at some time anyway: the budget holds.
        """
        self.settle_all()
        persistent = [s for s in self._slots.values() if s.role != "temporary"]
        limit = sum(s.nbytes for s in persistent if s.start != "below")
        here = [s for s in persistent if s.name not in self._below and self._tensor(s.name) is not None]
        used = sum(s.nbytes for s in here)
        for slot in sorted(here, key=lambda s: (s.name not in self._copied, -s.nbytes)):
            if used + nbytes <= limit:
                return
            self.send_down(slot.name)
            used -= slot.nbytes

    def has_slot(self, name: str) -> bool:
        """Whether a parameter or state can be sent down."""
        return name in self._slots

    def send_down(self, name: str) -> None:
        """Drop the device's copy of a parameter or state, after copying what is not below yet."""
        self._settle(name)
        if name in self._below:
            return
        if name not in self._copied:
            self.offload(name)
            self.wait(name)
        self.free(name)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """New content for a parameter or a state, at once where the plan has it between iterations."""
        self._verbs += 1
        self._settle(name)
        self._found(name)
        self._copied.discard(name)
        parameter, double_colon, state = name.partition("::")
        if double_colon:
            assert self._optimizer is not None
            self._optimizer.state[self._parameters[parameter]][state] = tensor
        else:
            self._parameters[parameter].data = tensor
        if name in self._slots:
            self._place(self._slots[name])

    def forget_states(self) -> None:
        """The optimizer's states are about to be replaced."""
        self._verbs += 1
        self.settle_all()
        for name in [n for n in self._layouts if "::" in n and not is_gradient_slot(n)]:
            self._below.discard(name)
            self._copied.discard(name)
            del self._layouts[name]

    def forget_copies(self, names: Iterable[str]) -> None:
        """Someone may have changed these on the device: their copies below do not count any more."""
        self._verbs += 1
        self._copied.difference_update(names)

    def settle_all(self) -> None:
        """Wait for everything that is under way."""
        for name in [*self._updating, *self._under_way]:
            self.wait(name)

    def offload(self, name: str, activation: torch.Tensor | None = None) -> None:
        """Start copying a parameter, a state or an activation down."""
        tensor = self._tensor(name) if activation is None else activation
        if tensor is None:
            return
        self._verbs += 1
        self.keep_to_limit()
        self._layouts[name] = _Layout.of(tensor)
        self._under_way[name] = _UnderWay("offloading", self.tier.offload(self._at[name], tensor), tensor)

    def reload(self, name: str) -> None:
        """Start copying up, into memory that is taken now."""
        if name not in self._layouts:
            return
        self._verbs += 1
        if self._resident is not None:
            self._resident.check()
        tensor = self._layouts[name].empty(self._alignment)
        self._under_way[name] = _UnderWay("reloading", self.tier.reload(self._at[name], tensor), tensor)

    def keep_to_limit(self) -> None:
        """Give freed memory back to the system if the process occupies more than it may."""
        if self._resident is not None:
            self._resident.check()

    def wait(self, name: str) -> torch.Tensor | None:
        """End with the copy of `name`. What was reloaded is returned; parameters and states are in their place then."""
        self._verbs += 1
        if name in self._updating:
            self._updated(name)
            return None
        under_way = self._under_way.pop(name, None)
        if under_way is None:
            return None
        if self._resident is not None:
            self._resident.check()
        under_way.transfer.wait()
        if under_way.direction == "offloading":
            self._copied.add(name)
            return None
        self._found(name)
        if self._slots[name].role != "temporary":
            held = self._tensor(name)
            assert held is not None
            held.data = under_way.tensor
        return under_way.tensor

    def changed(self, parameter: str) -> None:
        """The copies below of a parameter and its states are out of date."""
        self._verbs += 1
        self._copied.difference_update(self._family.get(parameter, ()))

    def free(self, name: str) -> None:
        """Drop the device's copy of a parameter or state."""
        tensor = self._tensor(name)
        if tensor is None:
            return
        if name not in self._copied:
            raise IllegalPlanError(f"{name} would be lost: its copy below is not up to date")
        self._verbs += 1
        nothing = self._nothing(name, tensor)
        if torch._C._autograd._profiler_enabled():
            with noted_release(tensor):
                tensor.data = nothing
        else:
            tensor.data = nothing
        self._below.add(name)
        leave(tensor, name)
        if name in self._parameters:
            self._absent.add(tensor, name)

    def _nothing(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor is while it is below: made once, and of its own, so that readers are told which one it is."""
        found = self._stands_for.get(name)
        if found is None or (found.shape, found.dtype, found.device) != (tensor.shape, tensor.dtype, tensor.device):
            found = self._stands_for[name] = absent(tensor, tensor.device)
        return found

    def _found(self, name: str) -> None:
        """Its content is on the device, or about to be."""
        if name in self._below:
            self._below.discard(name)
            tensor = self._tensor(name)
            if tensor is not None:
                arrive(tensor)
        if name in self._parameters:
            self._absent.discard(self._parameters[name])

    def record(self, on: bool) -> None:
        """Keep the times of copies and of updates below, from now on or no more."""
        self.tier.record = on
        self._update_times.clear()

    def recorded(self) -> list[TraceSpan]:
        """What was kept, on the scale of `time.perf_counter`."""
        copies = [TraceSpan("measured", s.stream, s.name, s.nbytes, s.start_s, s.end_s) for s in self.tier.spans]
        return copies + [TraceSpan("measured", "update", name, 0, a, b) for name, a, b in self._update_times]

    def let_finish(self, seconds: float) -> None:
        """Let what is under way end, without waiting for it as a plan does; at most for so long."""
        deadline = time.monotonic() + seconds
        for transfer in [u.transfer for u in self._under_way.values()] if self.tier.spans else []:
            while not transfer.done() and time.monotonic() < deadline:
                time.sleep(1e-4)
        wait(self._updating.values(), max(0.0, deadline - time.monotonic()))

    def in_flight(self) -> list[torch.Tensor]:
        """Device memory that reloads have taken and nobody holds yet."""
        return [u.tensor for u in self._under_way.values() if u.direction == "reloading"]


def noted_release(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Tell a profiler what memory goes away here: it does not see the release of memory older than itself."""
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    storage = tensor.untyped_storage()
    mark: contextlib.AbstractContextManager[Any] = torch.autograd.profiler.record_function(
        f"{RELEASE} {storage.data_ptr()} {storage.nbytes()}"
    )
    return mark
