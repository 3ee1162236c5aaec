"""One training step as a `torch.fx` graph: forward, loss and backward through `make_fx` on fake tensors; or a forward
alone."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from stowage.stages.ir.errors import TraceError
from stowage.stages.structure import leaves, with_tensors
from stowage.stages.trace.checks import SelfChange, check_module, without_gradient_checkpointing
from stowage.stages.trace.packing import packing_as_in_eager
from stowage.stages.workload.autocast import without_autocast

PATH, PHASE = "stowage_path", "stowage_phase"

Compute = Callable[[nn.Module, Any], list[torch.Tensor]]
"""From the model and the batch to what the program returns: the loss alone, in a training step."""


@dataclass(frozen=True)
class Captured:
    """A traced step.

    Attributes:
        module: the graph module; placeholders are parameters, buffers, then tensors of the batch, in that order; its
            outputs are what it returns (the loss), then one gradient (or None) per trainable parameter.
        parameters, buffers: names in placeholder order.
        trainable: names of parameters that have a gradient output, in output order; none in a forward alone.
        inputs: labels of the batch's tensors.
        notices: what the user should know, one sentence each.
        gradients: False in a forward alone.
    """

    module: fx.GraphModule
    parameters: list[str]
    buffers: list[str]
    trainable: list[str]
    inputs: list[str]
    notices: list[str]
    gradients: bool = True


class _Program(nn.Module):
    """Computes what the program returns; notices buffers that forward replaces instead of changing in place."""

    def __init__(self, model: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, batch: Any) -> list[torch.Tensor]:
        given = dict(self.model.named_buffers())
        result = self.compute(self.model, batch)
        for name, buffer in self.model.named_buffers():
            if given.get(name) is not buffer:
                raise TraceError(
                    f"Buffer '{name}' is replaced in forward, which a planned step would not repeat: change it in "
                    f"place (`self.{name.rpartition('.')[2]}.copy_(...)`)."
                )
        return result


class _Marker:
    """Marks graph nodes with the path of the module that made them and with their phase, as they appear."""

    def __init__(self, model: nn.Module) -> None:
        self.stack: list[str] = []
        self.phase = "forward"
        self._paths = {id(module): path for path, module in model.named_modules()}

    def sweep(self) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        for node in reversed(mode.tracer.graph.nodes):
            if PHASE in node.meta:
                break
            node.meta[PHASE] = self.phase
            node.meta[PATH] = self.stack[-1] if self.stack else ""

    def enter(self, module: nn.Module, _arguments: Any) -> None:
        self.sweep()
        path = self._paths.get(id(module))
        self.stack.append(path if path is not None else (self.stack[-1] if self.stack else ""))

    def leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        self.sweep()
        if self.stack:
            self.stack.pop()


@contextlib.contextmanager
def _marking(model: nn.Module, marker: _Marker) -> Iterator[None]:
    handles = [
        nn.modules.module.register_module_forward_pre_hook(marker.enter),
        nn.modules.module.register_module_forward_hook(marker.leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_accumulated(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient as eager's `AccumulateGrad` leaves it in `.grad`: in memory of its own, laid out as the parameter.

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


def _owned(result: torch.Tensor, held: set[int]) -> torch.Tensor:
    """What a forward returns, in memory of its own: a weight that is returned may leave the device."""
    plain = not isinstance(result, FakeTensor)  # a tensor that the model keeps beside its parameters and buffers
    return result.clone() if plain or result.untyped_storage()._cdata in held else result


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """PyTorch's own attention and encoder layers take fused kernels without gradients, unless they see a trace."""
    attention: Any = nn.modules.activation
    overrides: Any = torch.overrides
    before = attention._is_make_fx_tracing, overrides.has_torch_function
    attention._is_make_fx_tracing = lambda: False
    overrides.has_torch_function = lambda arguments: False
    try:
        yield
    finally:
        attention._is_make_fx_tracing, overrides.has_torch_function = before


def _user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither PyTorch's nor ours."""
    skip = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skip)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"


def _explain(error: BaseException, marker: _Marker) -> TraceError:
    where = f"Module '{(marker.stack or [''])[-1]}' ({_user_line(error)})"
    if isinstance(error, DataDependentOutputException):
        return TraceError(
            f"{where} reads a tensor's value during the step ({error.func}), so its control flow depends on data and "
            "cannot be planned: compute the value before the step and pass it in the batch."
        )
    if isinstance(error, DynamicOutputShapeException):
        return TraceError(
            f"{where} makes a tensor whose shape depends on data ({error.func}), which cannot be planned: use an "
            "operation with a fixed shape, such as torch.where."
        )
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    unsupported = isinstance(error, (UnsupportedOperatorException, NotImplementedError))
    if unsupported or "no fake impl registered" in first_line:
        return TraceError(
            f"{where} calls an operator without a fake kernel ({first_line}): register one with "
            "torch.library.register_fake."
        )
    return TraceError(f"{where} cannot be traced: {type(error).__name__}: {first_line}.")


def capture(
    model: nn.Module,
    batch: Any,
    compute: Compute,
    layouts: Mapping[str, torch.Tensor] | None = None,
    *,
    gradients: bool = True,
) -> Captured:
    """Trace one training step of `model` on `batch`, or without `gradients` a forward alone, as under
    `torch.no_grad()`; neither weights nor random state are touched.

    Parameters and batch may be fake tensors (a model without weights in memory) or real. A parameter in `layouts` is
    traced with the layout that it has there, on the meta device; its own memory is not looked at. Under
    `torch.autocast` the forward and the loss are traced with the casts it makes, the backward without, as PyTorch
    recommends to train.

    Raises:
        TraceError: the step cannot be traced; the text names the module and the line.
    """
    check_module(model)
    notices: list[str] = []
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    require = [name for name, p in parameters.items() if p.requires_grad]
    trainable = require if gradients else []
    inputs = leaves(batch)
    marker = _Marker(model)
    program = _Program(model, compute)
    cast_once = torch.is_autocast_cache_enabled()

    def step(
        parameter_list: list[torch.Tensor], buffer_list: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        given = dict(zip(parameters, parameter_list, strict=True))
        for name in require:
            given[name].requires_grad_(True)
        state = {**given, **dict(zip(buffers, buffer_list, strict=True))}
        # make_fx switches off autocast's cache of weights. Eager casts a weight once, however often it is used, and
        # adds up its gradients in the lower precision: cast anew for each use, they would be other numbers.
        torch.set_autocast_cache_enabled(cast_once)
        torch.clear_autocast_cache()
        with _marking(model, marker):
            results: list[torch.Tensor] = torch.func.functional_call(
                program, {f"model.{name}": tensor for name, tensor in state.items()}, (with_tensors(batch, tensors),)
            )
        marker.sweep()
        if not gradients:
            torch.clear_autocast_cache()
            held = {tensor.untyped_storage()._cdata for tensor in [*parameter_list, *buffer_list]}
            owned_results = [_owned(result, held) for result in results]
            marker.sweep()
            return [*owned_results]
        marker.phase = "backward"
        with without_autocast():
            grads = torch.autograd.grad(results[0], [given[name] for name in trainable], allow_unused=True)
        torch.clear_autocast_cache()
        taken = {tensor.untyped_storage()._cdata for tensor in [*parameter_list, *buffer_list, *tensors, *results]}
        owned = [
            None if g is None else _as_accumulated(g, given[name], taken)
            for name, g in zip(trainable, grads, strict=True)
        ]
        marker.sweep()
        return [*results, *owned]

    given_layouts = layouts or {}
    traced_as = [given_layouts.get(name, p) for name, p in parameters.items()]
    values = (traced_as, list(buffers.values()), [tensor for _, tensor in inputs])
    everything: list[Any] = [*values[0], *values[1], *values[2]]
    is_fake = [isinstance(tensor, FakeTensor) for tensor in everything]
    if any(is_fake) and not all(is_fake):
        raise TraceError("Some parameters or batch tensors are fake and some real: make all of them fake, or all real.")
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    change = SelfChange(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_gradient_checkpointing(model, notices))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.set_grad_enabled(gradients))
        if not gradients:
            stack.enter_context(_fused_attention())
        stack.enter_context(packing_as_in_eager())
        # A mode of our own, not make_fx's: that one has symbols for unknown numbers, which would hide data dependence.
        mode = everything[0].fake_mode if any(is_fake) else FakeTensorMode(allow_non_fake_inputs=True)
        fakes = pytree.tree_map(lambda t: _fake(t, mode, device), values)
        stack.enter_context(mode)
        try:
            traced = make_fx(step, tracing_mode="real", record_stack_traces=True)(*fakes)
        except TraceError:
            raise
        except Exception as error:
            raise _explain(error, marker) from error
    change.check()
    return Captured(
        module=traced,
        parameters=list(parameters),
        buffers=list(buffers),
        trainable=trainable,
        inputs=[label for label, _ in inputs],
        notices=notices,
        gradients=gradients,
    )


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
