"""Records every ATen call of a program in an `fx.Graph`, on tensors without memory.

The user's own objects run as they are: every real tensor that a call meets (a parameter, a buffer, a tensor of a loss,
of a closure, of a list) is known by reference, and becomes a source of the graph. No object is replaced, so backward
functions, hooks and modules that are called twice work as in plain PyTorch.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, autograd_would_have_decomposed
from torch.utils.weak import WeakTensorKeyDictionary

from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.flags import FLAGGED, made_anyway
from stowage.stages.ir.results import flat_results, grouped, groups_of, places
from stowage.stages.trace.calls.operators import draws_by_itself, is_random
from stowage.stages.trace.recording.composite import composed
from stowage.stages.trace.recording.fake import TrueKernels
from stowage.stages.trace.recording.kernels_by_content import refuse_fill
from stowage.stages.workload.executed import noting

PATH, PHASE, SOURCE, LOCATION = "stowage_path", "stowage_phase", "stowage_source", "stowage_location"
FUNCTION = "stowage_function"
"""Keys of `Node.meta`: a call's module, phase and source line; for a source its role and name."""

LEFT = "left."
"""The prefix of names of memory for what a step leaves in the user's objects."""

aten: Any = torch.ops.aten

KNOWN_ELEMENTS = 1 << 16
"""The most elements of a tensor that is evaluated while tracing, if it depends on no input."""

_ASKS_FORM = {aten.size.default, aten.stride.default, aten.storage_offset.default, torch.ops.prim.device.default}
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MACHINERY = (_HERE, _TORCH + "_", _TORCH + os.path.join("utils", ""))
_EXCHANGING = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operators that all ranks have to call together, and planning runs them on one."""

_RECURRENT = str(torch.nn.modules.rnn.__file__)
"""The file of the recurrent layers.

They ask PyTorch whether all weights lie in one buffer, by pointers that a fake tensor does not have. In a trace they do
not: cuDNN's operator then copies them into one, which changes no result.
"""


_CPU = torch.device("cpu")


_ROLES = {"input": "batch's tensor"}
"""Role of a source -> what users call it, if that is another word."""


def _is_numbered_cpu(device: torch.device) -> bool:
    """Say whether this is the CPU as libraries for several processes name it, with a number.

    Real tensors on it say that they are on `cpu`, and fake ones say the number.
    """
    return device.type == "cpu" and device.index is not None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls while it is entered, inside of a `FakeTensorMode`.

    Attributes:
        graph: the calls that were recorded so far.
        literals: tensors made from numbers in the user's code, by name.
        outside: real tensors that calls use and that `know` was not called with, by name.
        where: returns phase and module path of the call that is recorded.
        place: returns the module and line that run now, for error messages.
        answer: returns the number to use for one that is read off a tensor (a copy of it) and not known, or raises.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        where: Callable[[], tuple[str, str]],
        answer: Callable[[OpOverload, torch.Tensor], Any],
        *,
        place: Callable[[], str] = lambda: "The step",
        name_of: Callable[[torch.Tensor], str | None] = lambda tensor: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.literals: dict[str, torch.Tensor] = {}
        self.outside: dict[str, torch.Tensor] = {}
        self.where = where
        self.answer = answer
        self._place = place
        self._name_of = name_of
        self._fake_mode = fake_mode
        self._kernels = TrueKernels()
        self._fakes = WeakTensorKeyDictionary()
        self._nodes = WeakTensorKeyDictionary()
        self._written: set[int] = set()
        self._assumed: dict[fx.Node, torch.Tensor] = {}
        self._names: set[str] = set()
        self._kept: list[torch.Tensor] = []  # so that no storage's identity is reused

    def know(self, tensor: torch.Tensor, role: str, name: str, layout: torch.Tensor | None = None) -> torch.Tensor:
        """Add a source and return the fake tensor that stands for it.

        Args:
            tensor: the real or fake tensor.
            role: `parameter`, `buffer` or `input`.
            name: its name, unique among the sources.
            layout: a tensor on the meta device whose layout is used instead of the tensor's own.
        """
        self._check_layout(tensor, f"The {_ROLES.get(role, role)} '{name}'")
        fake = self._fake(tensor if layout is None else layout, tensor.device)
        node = self.graph.create_node("placeholder", f"{role}_{len(self._kept)}")
        node.meta.update({"val": snapshot_fake(fake), SOURCE: (role, name)})
        self._track(fake, node)
        self._names.add(name)
        if fake is not tensor:
            self._fakes[tensor] = fake
        return fake

    def draws(self) -> int:
        """Count the random calls that were recorded so far."""
        return sum(isinstance(n.target, OpOverload) and is_random(n.target) for n in self.graph.nodes)

    def room(self, like: torch.Tensor, name: str) -> torch.Tensor:
        """Add a source with memory for a tensor like this one, which exists before the program runs."""
        with _disable_current_modes(), self._fake_mode:
            fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        node = self.graph.create_node("get_attr", f"room_{name}")
        node.meta.update({"val": snapshot_fake(fake), SOURCE: ("outside", name)})
        self._track(fake, node)
        self._names.add(name)
        return fake

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor that stands for a tensor."""
        found: torch.Tensor = self._fakes.get(tensor, tensor)  # type: ignore[no-untyped-call]
        return found

    def knows(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a source."""
        return tensor in self._fakes

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for any tensor; one that is seen for the first time becomes a source."""
        return self._given(tensor)

    def sources(self) -> list[torch.Tensor]:
        """List a tensor for every source that was seen so far, which shares its memory."""
        return self._sources(lambda role: True)

    def lasting(self) -> list[torch.Tensor]:
        """List the tensors of `sources` for sources that outlive the call: all but the caller's batch."""
        return self._sources(lambda role: role != "input")

    def _sources(self, wanted: Callable[[str], bool]) -> list[torch.Tensor]:
        return [n.meta["val"] for n in self.graph.nodes if SOURCE in n.meta and wanted(n.meta[SOURCE][0])]

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that made a tensor, or the source that it is."""
        found: fx.Node = self._nodes[self._given(tensor)]
        return found

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value, on the CPU, of a tensor that was made from numbers alone; else None."""
        node = self._nodes.get(self.fake_of(tensor))  # type: ignore[no-untyped-call]
        if node is None or tensor.numel() > KNOWN_ELEMENTS:
            return None
        with _disable_current_modes(), torch.no_grad():
            value: torch.Tensor | None = self._evaluate(node, {})
        return value

    def assume(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Note the value that a source has in all steps that are like this one."""
        self._assumed[self.node_of(tensor)] = value.detach().cpu()

    def assumed_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor that was made from numbers and assumed values alone; else None."""
        node = self._nodes.get(self.fake_of(tensor))  # type: ignore[no-untyped-call]
        if node is None:
            return None
        with _disable_current_modes(), torch.no_grad():
            value: torch.Tensor | None = self._evaluate(node, dict(self._assumed))
        return value

    def _evaluate(self, node: fx.Node, done: dict[fx.Node, Any]) -> Any:
        if node in done:
            return done[node]
        if node.op == "get_attr" and str(node.target) in self.literals:
            done[node] = self.literals[str(node.target)]
            return done[node]
        if node.target is operator.getitem:
            several = _as_node(node.args[0])
            value = self._evaluate(several, done)
            done[node] = None if value is None else value[node.args[1]]
            return done[node]
        target = node.target
        if not isinstance(target, OpOverload) or target._schema.is_mutable or is_random(target):
            return None
        made = [t for t in pytree.tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor)]
        if any(t.untyped_storage()._cdata in self._written or t.numel() > KNOWN_ELEMENTS for t in made):
            return None
        if any(self._evaluate(other, done) is None for other in node.all_input_nodes):
            return None

        def leaf(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return done[item]
            return torch.device("cpu") if isinstance(item, torch.device) else item

        args, kwargs = pytree.tree_map(leaf, (list(node.args), dict(node.kwargs)))
        done[node] = target(*args, **kwargs)
        return done[node]

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.is_meta:
            with self._fake_mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        with _disable_current_modes():
            return self._fake_mode.from_tensor(tensor)

    def _check_layout(self, tensor: torch.Tensor, what: str) -> None:
        """Raise `TraceError` for a tensor that is not dense."""
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"{what} is sparse ({str(tensor.layout).removeprefix('torch.')}), and how much memory it takes depends "
                "on data: make it dense with to_dense(), or keep its indices and values as tensors and add up with "
                "index_add."
            )

    def _check_results(self, out: Any) -> None:
        """Raise `TraceError` for a call that makes a tensor that is not dense."""
        for tensor in flat_results(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
                if self.where()[0] == "backward":
                    raise TraceError(
                        f"{self._place()} makes a sparse gradient, whose size depends on data: compute it densely, "
                        "with sparse=False in an embedding and sparse_grad=False in a gather."
                    )
                self._check_layout(tensor, f"{self._place()} makes a tensor that")

    def _track(self, fake: torch.Tensor, node: fx.Node) -> None:
        self._nodes[fake] = node
        self._kept.append(node.meta["val"] if isinstance(node.meta["val"], torch.Tensor) else fake)

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for an argument; a real tensor that is seen for the first time becomes a source."""
        fake = self.fake_of(tensor)
        if fake not in self._nodes:
            name = f"outside.{self._name_of(tensor) or f'tensor_{len(self.outside)}'}"
            while name in self._names:
                name += "'"
            self._names.add(name)
            self._check_layout(tensor, f"{self._place()} reads a tensor that")
            fake = self._fake(tensor, tensor.device)
            node = self.graph.create_node("get_attr", f"outside_{len(self.outside)}")
            role = "parameter" if tensor.requires_grad and tensor.is_leaf else "outside"
            node.meta.update({"val": snapshot_fake(fake), SOURCE: (role, name)})
            self.outside[name] = tensor
            self._track(fake, node)
            if fake is not tensor:
                self._fakes[tensor] = fake
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        resting = noting() if isinstance(func, OpOverload) and func.namespace == "aten" else None
        if resting is None:
            return self._dispatched(func, args, kwargs or {})
        resting.disable()
        try:
            return self._dispatched(func, args, kwargs or {})
        finally:
            resting.enable()

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _ASKS_FORM:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func.namespace in _EXCHANGING:
            raise TraceError(
                f"{self._place()} exchanges tensors with other ranks ({func}), which a planned step does not do: do it "
                "before the step, and pass what comes of it in the batch, or train in plain PyTorch."
            )
        args = _asking_for_what_is_made_anyway(func, args)
        flat, structure = pytree.tree_flatten((args, kwargs))
        if any(isinstance(item, torch.device) and _is_numbered_cpu(item) for item in flat):
            flat = [_CPU if isinstance(item, torch.device) and _is_numbered_cpu(item) else item for item in flat]
            args, kwargs = pytree.tree_unflatten(flat, structure)
        if func._can_decompose() and autograd_would_have_decomposed(func, flat):
            with self:
                result = composed(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten.lift_fresh.default:
            return self._literal(args[0])
        if func is aten.set_.source_Storage and _asked_by(_RECURRENT):
            return args[0]
        generators = [item for item in flat if isinstance(item, torch.Generator)]
        if draws_by_itself(func, args, generators):
            raise TraceError(
                f"{self._place()} has dropout inside a recurrent layer of cuDNN's, which draws it from a state of its "
                "own that a plan cannot keep: use dropout=0 and nn.Dropout between single layers, or "
                "torch.backends.cudnn.enabled = False."
            )
        if generators:
            raise TraceError(
                f"{self._place()} draws from a torch.Generator of its own, whose state a plan does not keep: draw from "
                "the global generator, which torch.manual_seed seeds, or before the step, and pass the numbers in the "
                "batch."
            )
        refuse_fill(func, args, self._place)
        given = [self._given(item) if isinstance(item, torch.Tensor) else item for item in flat]
        fake_args, fake_kwargs = pytree.tree_unflatten(given, structure)
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, given, structure)
        nodes = [self._nodes[item] if isinstance(item, torch.Tensor) else item for item in given]
        try:
            out = self._kernels(func, fake_args, fake_kwargs)
        except DynamicOutputShapeException:
            value = self._compute(func, given, structure)
            if value is None:
                raise
            return pytree.tree_map_only(torch.Tensor, self._literal, value)
        self._check_results(out)
        self._record(func, pytree.tree_unflatten(nodes, structure), out)
        if func._schema.is_mutable:
            originals = {id(fake): item for fake, item in zip(given, flat, strict=True) if fake is not item}
            return pytree.tree_map(lambda item: originals.get(id(item), item), out)
        return out

    def _record(self, func: OpOverload, arguments: Any, out: Any) -> fx.Node:
        args, kwargs = arguments
        name = self.graph._target_to_str(func.overloadpacket.__name__)
        node = self.graph.create_node("call_function", func, tuple(args), dict(kwargs), name=name)
        phase, path = self.where()
        node.meta.update({PHASE: phase, PATH: path, LOCATION: _user_line(sys._getframe(2))})
        if (function := _backward_function(phase)) is not None:
            node.meta[FUNCTION] = function
        many = isinstance(out, (list, tuple))
        tensors, groups = flat_results(out), groups_of(out)
        snapshots = [snapshot_fake(t) if isinstance(t, torch.Tensor) else t for t in tensors]
        node.meta["val"] = tuple(grouped(snapshots, groups)) if many else snapshots[0]
        if func._schema.is_mutable:
            for tensor in _mutated(func, node):
                self._written.add(tensor.untyped_storage()._cdata)
        lists: dict[int, fx.Node] = {}
        for (i, *inside), tensor, snapshot in zip(places(groups, len(tensors)), tensors, snapshots, strict=True):
            if not isinstance(tensor, torch.Tensor):
                continue
            maker = node
            if many:
                maker = lists.get(i) or self._item(node, i, node.meta["val"][i])
            for j in inside:
                lists[i] = maker
                maker = self._item(maker, j, snapshot)
            self._track(tensor, maker)
        return node

    def _item(self, several: fx.Node, index: int, value: Any) -> fx.Node:
        node = self.graph.create_node("call_function", operator.getitem, (several, index))
        node.meta.update({"val": value, PHASE: several.meta[PHASE], PATH: several.meta[PATH]})
        return node

    def _literal(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor that the user's code made from numbers as a source, and return a copy of it."""
        name = f"_tensor_constant{len(self.literals)}"
        with _disable_current_modes():
            self.literals[name] = tensor.detach().clone()
        fake = self._fake(self.literals[name], tensor.device)
        node = self.graph.create_node("get_attr", name)
        node.meta.update({"val": snapshot_fake(fake), SOURCE: ("constant", name)})
        self._track(fake, node)
        out = aten.clone.default(fake)
        self._record(aten.lift_fresh_copy.default, ((node,), {}), out)
        return out  # type: ignore[no-any-return]

    def _compute(self, func: OpOverload, given: list[Any], structure: Any) -> Any:
        """Return the call's true result, if none of its tensors depends on an input; else None."""
        values = [self.known_value(item) if isinstance(item, torch.Tensor) else item for item in given]
        if any(v is None and isinstance(item, torch.Tensor) for v, item in zip(values, given, strict=True)):
            return None
        args, kwargs = pytree.tree_unflatten(values, structure)
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def _read(self, func: OpOverload, given: list[Any], structure: Any) -> Any:
        value = self._compute(func, given, structure)
        if value is not None:
            return value
        tensor = next(item for item in given if isinstance(item, torch.Tensor))
        copy = aten.clone.default(tensor)  # keeps the value, even if the tensor is overwritten
        self._record(aten.clone.default, ((self._nodes[tensor],), {}), copy)
        return self.answer(func, copy)


def _asked_by(file: str) -> bool:
    """Say whether the innermost frame outside of tracing and of PyTorch's own machinery is in this file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename == file


def _asking_for_what_is_made_anyway(func: OpOverload, args: Any) -> Any:
    """Return arguments with the flag set of the result that a kernel must not go without, see `ir.flags`."""
    if str(func) not in FLAGGED or (result := made_anyway(str(func), args[0].device.type)) < 0:
        return args
    return *args[:-1], [flag or i == result for i, flag in enumerate(args[-1])]


def _as_node(item: Any) -> fx.Node:
    assert isinstance(item, fx.Node)
    return item


def _backward_function(phase: str) -> int | None:
    """Return the sequence number of the backward function that runs now, or that has just been made for a forward call.

    A forward call that has none gives the number of the last one that was made before it.
    """
    if phase != "backward":
        return int(torch._C._autograd._get_sequence_nr()) - 1
    running: Any = torch._C._current_autograd_node()
    number = None if running is None else int(running._sequence_nr())
    return number if number is not None and number <= sys.maxsize else None  # those that end at a leaf have one number


def _mutated(func: OpOverload, node: fx.Node) -> list[torch.Tensor]:
    """List the tensors that a call writes, as they are in its node."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        item = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
        found += item if isinstance(item, (list, tuple)) else [item]
    return [item.meta["val"] for item in found if isinstance(item, fx.Node)]


def _user_line(frame: Any) -> str:
    """Return `file:line` of the innermost frame outside of PyTorch, up to where tracing begins; else ""."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            if frame.f_code.co_name == "capture" and file.endswith("capture.py"):
                return ""
        elif not file.startswith(_TORCH) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
