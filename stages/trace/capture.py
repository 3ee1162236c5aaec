"""Captures a training step (forward, loss and backward) or a forward alone as a graph of ATen calls, without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stowage.stages.ir.errors import ParameterError, TraceError
from stowage.stages.ir.quiet import quiet_torch
from stowage.stages.structure import leaves, with_tensors
from stowage.stages.trace.checks import check_generators, check_gradients, check_module, check_parameters
from stowage.stages.trace.explain import cause_of, explain, here
from stowage.stages.trace.objects.left import Seen, move_numbers, see
from stowage.stages.trace.objects.outside import Outside
from stowage.stages.trace.objects.preserve import Snapshot
from stowage.stages.trace.recording.checkpointing import without_gradient_checkpointing
from stowage.stages.trace.recording.compiled import nothing_compiled
from stowage.stages.trace.recording.kernels_by_content import kernels_by_content
from stowage.stages.trace.recording.marking import Marker
from stowage.stages.trace.recording.nested import nested_as_padded
from stowage.stages.trace.recording.packing import packing_as_in_eager
from stowage.stages.trace.recording.readings import Readings
from stowage.stages.trace.recording.record import LEFT, Recorder
from stowage.stages.trace.recording.seeding import nothing_seeded
from stowage.stages.trace.recording.values import WithoutValues
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.values_looked_at import NO_PADDING, ONE_SEQUENCE, looked_at

Compute = Callable[[nn.Module, Any], list[torch.Tensor]]
"""Maps the model and the batch to what the program returns: in a training step, the loss alone."""


@dataclass(frozen=True)
class Captured:
    """A traced step.

    Attributes:
        graph: its sources are parameters, buffers and tensors of the batch, in that order, then other tensors that it
            read; its outputs are what it returns (the loss), then one gradient (or None) per trainable parameter.
        trainable: names of parameters that have a gradient output, in output order; none in a forward alone.
        literals: tensors made from numbers in the user's code, by the name of their source.
        outside: tensors that belong neither to the model nor to the batch, by name; parameters among them.
        notices: what the user should know, one sentence each.
        gradients: False in a forward alone.
        readings: numbers that the user's code read off tensors whose values are not known while tracing.
        seen: what the step has changed in the user's objects.
        left: the tensors of `seen`, then those of `readings`; outputs that follow what the program returns.
        returns: how many outputs the program returns.
        counted: positions in `left` of tensors that replace a source of the trace.
        merges: equal masks and the like may be computed once.
    """

    graph: fx.Graph
    trainable: list[str]
    literals: dict[str, torch.Tensor]
    outside: Outside
    notices: list[str]
    gradients: bool = True
    readings: Readings = field(default_factory=Readings)
    seen: Sequence[Seen] = ()
    left: Sequence[torch.Tensor] = ()
    returns: int = 1
    counted: frozenset[int] = frozenset()
    merges: bool = True


def capture(
    model: nn.Module,
    batch: Any,
    compute: Compute,
    layouts: Mapping[str, torch.Tensor] | None = None,
    *,
    gradients: bool = True,
    backward: bool = True,
    roots: Mapping[str, Any] | None = None,
    readings: Readings | None = None,
    changed: Sequence[Seen] = (),
) -> Captured:
    """Trace one training step of `model` on `batch`, or without `gradients` a forward alone as under `torch.no_grad()`.

    The user's objects run as they are, and are restored afterwards; so are generators. Parameters and batch may be fake
    tensors (a model without weights in memory) or real. Under `torch.autocast` the forward and the loss are traced with
    the casts it makes, the backward without, as PyTorch recommends to train.

    Args:
        model: any module.
        batch: any batch.
        compute: calls the model and returns what the program returns.
        layouts: name of a parameter -> a tensor on the meta device, whose layout is used instead of the parameter's
            own.
        gradients: trace the backward too.
        backward: False with `gradients` traces the forward alone, as it is in training.
        roots: what else runs than the model, by name: the loss, an objective.
        readings: the answers for numbers that are read off tensors.
        changed: what an earlier trace changed: numbers there get other values this time.

    Raises:
        TraceError: the step cannot be traced; the text names the module and the line.
    """
    check_module(model)
    check_parameters(model)
    parameters = dict(model.named_parameters())
    notices: list[str] = []
    marker = Marker(model)
    readings = readings or Readings()
    given = {**parameters, **dict(model.named_buffers())}
    inputs = leaves(batch)
    mode = _fake_mode([*given.values(), *(tensor for _, tensor in inputs)])
    place = partial(here, marker)
    recorder = Recorder(mode, marker.where, lambda func, tensor: readings.answer(func, tensor, marker), place=place)
    for name, parameter in parameters.items():
        recorder.know(parameter, "parameter", name, (layouts or {}).get(name))
    for name, buffer in model.named_buffers():
        recorder.know(buffer, "buffer", name)
    fake_batch = with_tensors(batch, [recorder.know(tensor, "input", label) for label, tensor in inputs])
    for label, tensor in inputs:
        if looked_at(label, tensor) in (NO_PADDING, ONE_SEQUENCE):
            recorder.assume(tensor, tensor)
    snapshot = Snapshot({"model": model, "batch": batch, **(roots or {})})
    try:
        move_numbers(changed, readings.round)
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_torch())
            stack.enter_context(without_gradient_checkpointing(model, notices, recorder.graph))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if not gradients:
                stack.enter_context(_fused_attention())
                stack.enter_context(nested_as_padded())
            stack.enter_context(packing_as_in_eager(recorder))
            stack.enter_context(kernels_by_content())
            stack.enter_context(nothing_compiled(place))
            stack.enter_context(nothing_seeded(place, recorder.draws))
            stack.enter_context(_autocast_cache())
            stack.enter_context(mode)
            stack.enter_context(recorder)
            stack.enter_context(WithoutValues(recorder.stand_in))
            try:
                with marker.watching():
                    results = compute(model, fake_batch)
                leaving = _Leaving(recorder, readings, copies=gradients)
                seen = leaving.take(see(snapshot, model))
                if gradients and backward:
                    marker.phase = "backward"
                    trainable, ends = _backward(recorder, results, parameters)
                    check_gradients(snapshot)
                    seen = leaving.take(see(snapshot, model))  # including what hooks leave
                else:
                    trainable, ends = [], [_owned(recorder, result) for result in results]
                left = leaving.tensors(seen)
            except (ParameterError, TraceError):  # these explain themselves
                raise
            except Exception as error:
                raise explain(error, marker) from cause_of(error)
        check_generators(snapshot)
    finally:
        snapshot.restore()
    ways = {name: snapshot.way_to(tensor) for name, tensor in recorder.outside.items()}
    count = len(results)
    outputs = [*ends[:count], *left, *ends[count:]]
    recorder.graph.output([None if t is None else recorder.node_of(t) for t in outputs])
    return Captured(
        recorder.graph,
        trainable,
        recorder.literals,
        Outside(recorder.outside, ways),
        notices,
        gradients=gradients,
        readings=readings,
        seen=seen,
        left=left,
        returns=count,
        counted=_counted(recorder, seen),
    )


def _counted(recorder: Recorder, seen: Sequence[Seen]) -> frozenset[int]:
    tensors = [change for change in seen for _ in change.tensors]
    return frozenset(
        i
        for i, change in enumerate(tensors)
        if isinstance(change.replaced, torch.Tensor) and recorder.knows(change.replaced)
    )


class _Leaving:
    """Takes the tensors that the user's code leaves in its objects.

    A training step copies them into memory that exists before it, so that they are written once even if they are
    computed again; a forward alone returns them.
    """

    def __init__(self, recorder: Recorder, readings: Readings, *, copies: bool) -> None:
        self._recorder = recorder
        self._readings = readings
        self._copies = copies
        self._homes: dict[int, torch.Tensor] = {}

    def take(self, seen: Sequence[Seen]) -> Sequence[Seen]:
        """Give each tensor its place, if it has none yet."""
        with torch.no_grad():
            for tensor in self._found(seen):
                if id(tensor) not in self._homes:
                    self._homes[id(tensor)] = self._home(tensor)
        return seen

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._copies:
            return _owned(self._recorder, tensor)
        room = self._recorder.room(self._recorder.fake_of(tensor), f"{LEFT}{len(self._homes)}")
        return room.copy_(tensor)

    def _found(self, seen: Sequence[Seen]) -> list[torch.Tensor]:
        readings = [tensor for tensor, _ in [*self._readings.numbers, *self._readings.truths]]
        return [*(tensor for change in seen for tensor in change.tensors), *readings]

    def tensors(self, seen: Sequence[Seen]) -> list[torch.Tensor]:
        """Return the places of the tensors that were seen at the end, then of those that were read."""
        return [self._homes[id(tensor)] for tensor in self._found(seen)]


def _backward(
    recorder: Recorder, results: list[torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[list[str], list[torch.Tensor | None]]:
    """Return the names of what trains, the model's parameters first; and the program's outputs, then the gradients."""
    met = {name: t for name, t in recorder.outside.items() if t.requires_grad and t.is_leaf}
    training = {**{name: p for name, p in parameters.items() if p.requires_grad}, **met}
    with without_autocast():
        found = torch.autograd.grad(results[0], list(training.values()), allow_unused=True)
    torch.clear_autocast_cache()
    everything = [*recorder.sources(), *results]
    taken = {tensor.untyped_storage()._cdata for tensor in everything}
    gradients = [
        None if g is None else _as_accumulated(g, recorder.fake_of(p), taken)
        for g, p in zip(found, training.values(), strict=True)
    ]
    return list(training), [*results, *gradients]


def _as_accumulated(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return the gradient as eager's `AccumulateGrad` leaves it: in its own memory, laid out as the parameter.

    Eager keeps a gradient that already is so and copies any other (an expanded one after `y.sum()`, one shared by two
    parameters, one with other strides).
    """
    storage = gradient.untyped_storage()
    own = storage._cdata not in taken and storage.nbytes() == gradient.numel() * gradient.element_size()
    if own and gradient.stride() == parameter.stride():
        taken.add(storage._cdata)
        return gradient
    copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    copy.copy_(gradient)
    taken.add(copy.untyped_storage()._cdata)
    return copy


def _owned(recorder: Recorder, result: torch.Tensor) -> torch.Tensor:
    """Return a result in memory of its own: a returned weight may be offloaded while the caller still reads it."""
    lasting_memory = {tensor.untyped_storage()._cdata for tensor in recorder.lasting()}
    return result.clone() if recorder.fake_of(result).untyped_storage()._cdata in lasting_memory else result


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Let PyTorch's attention and encoder layers use their fused kernels, which they avoid when they see a trace."""
    attention: Any = nn.modules.activation
    overrides: Any = torch.overrides
    before = attention._is_make_fx_tracing, overrides.has_torch_function
    attention._is_make_fx_tracing = lambda: False
    overrides.has_torch_function = lambda arguments: False
    try:
        yield
    finally:
        attention._is_make_fx_tracing, overrides.has_torch_function = before


@contextlib.contextmanager
def _autocast_cache() -> Iterator[None]:
    """Clear autocast's cache of cast weights before and after, so that it serves this trace alone."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _fake_mode(given: list[torch.Tensor]) -> FakeTensorMode:
    """Return the mode of the tensors that are fake already; else a new one."""
    fakes = [t for t in given if isinstance(t, FakeTensor)]
    if not fakes:
        return FakeTensorMode(allow_non_fake_inputs=True)
    if len(fakes) < len(given):
        raise TraceError("Some parameters or batch tensors are fake and some real: make all of them fake, or all real.")
    mode: FakeTensorMode = fakes[0].fake_mode
    return mode
