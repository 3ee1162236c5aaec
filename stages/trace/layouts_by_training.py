"""Finds whose results must be laid out as in plain PyTorch, by what trains, for all that follows to have its kernels.

A product with a frozen weight, or attention with a frozen mask, has results with other strides in plain PyTorch, and
some kernels differ by the strides of what they read. Mostly a copy on the way makes them equal again; a plan keeps the
strides that results have while everything trains, since the calls that follow were recorded for those. With one sample
there is no copy. Two traces tell which it is. Where what was computed with such results is copied in one of them alone,
a step copies it in both cases: what follows reads the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from stowage.stages.ir.by_training import BY_TRAINING
from stowage.stages.ir.errors import TraceError

_aten: Any = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default}
"""Views to a shape; PyTorch takes one or the other by strides and by who asks."""

_CLONE = _aten.clone.default
_IN_ORDER = {"memory_format": torch.contiguous_format}
_COPY = "copy"
Result = tuple[int, int]
"""The number of a call of the operators in `BY_TRAINING`, in their order, and which of its results."""


@dataclass(frozen=True)
class _Read:
    """A tensor that a call reads.

    Attributes:
        maker: which call made it, or which source it is, and which result.
        way: the views and copies that lead to it.
        nodes: those of the way.
        strides: how it lies.
    """

    maker: tuple[int, int]
    way: tuple[str, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    strides: tuple[int, ...] = ()

    def by(self, step: str, node: fx.Node) -> _Read:
        """Return what a view or copy makes of it."""
        return _Read(self.maker, (*self.way, step), (*self.nodes, node))


@dataclass(frozen=True)
class _Call:
    """A call that computes.

    Attributes:
        content: the function and its other arguments.
        reads: the tensors that it reads.
        writes: it changes what it reads.
        number: of an operator in `BY_TRAINING`, else None.
    """

    content: str
    reads: tuple[_Read, ...]
    writes: bool
    number: int | None


@dataclass(frozen=True)
class OwnLayouts:
    """What a step does to have plain PyTorch's layouts.

    Attributes:
        results: the results that are laid out by what trains.
        copied: the views, by their positions in the graph, before which it copies what they read.
    """

    results: Set[Result] = frozenset()
    copied: Set[int] = frozenset()


def own_layouts(trained: fx.Graph, frozen: Callable[[], fx.Graph]) -> OwnLayouts | None:
    """Return what must be laid out by what trains; None where calls would differ even then.

    Args:
        trained: a step with all results laid out as if everything trains.
        frozen: traces the same step, with those of the operators in `BY_TRAINING` laid out as if nothing did.
    """
    if not any(str(node.target) in BY_TRAINING for node in trained.nodes):
        return OwnLayouts()
    try:
        others = list(_calls(frozen()))
    except TraceError:  # another thread disturbs
        return None
    calls = list(_calls(trained))
    own: set[Result] = set()
    copies: list[tuple[tuple[int, int], fx.Node]] = []
    for call, other in zip_longest(calls, others):
        if call is None or other is None or (call.content, len(call.reads)) != (other.content, len(other.reads)):
            return None
        for one, two in zip(call.reads, other.reads, strict=True):
            found = _copied_in_frozen(one, two)
            if one.maker != two.maker or found is None or (call.writes and one.way != two.way):
                return None
            copies += [(one.maker, node) for node in found]
            if one.strides == two.strides:
                continue
            if one.way != two.way:
                return None
            index, item = one.maker
            number = calls[index].number if index >= 0 else None
            if number is not None:
                own.add((number, item))
    made_by = {maker: calls[maker[0]].number for maker, _ in copies}
    needed = {node for (index, item), node in copies if (n := made_by[index, item]) is None or (n, item) in own}
    return OwnLayouts(own, frozenset(i for i, node in enumerate(trained.nodes) if node in needed))


def _copied_in_frozen(trained: _Read, frozen: _Read) -> list[fx.Node] | None:
    """Return the views of a trained step before which only the frozen step copies; None where the views differ."""
    found: list[fx.Node] = []
    of_trained, of_frozen = (iter([*zip(r.way, r.nodes), None]) for r in (trained, frozen))
    one, two = next(of_trained), next(of_frozen)
    while one is not None or two is not None:
        if one is not None and two is not None and one[0] == two[0]:
            one, two = next(of_trained), next(of_frozen)
        elif one is not None and one[0] == _COPY:  # what it copies may lie in any way
            one = next(of_trained)
        elif two is not None and two[0] == _COPY:
            two = next(of_frozen)
            if one is None or two is None or one[0] != two[0] or _strides(one[1]) != _strides(two[1]):
                return None
            found.append(one[1])
        else:
            return None
    return found


def copy_before(graph: fx.Graph, positions: Set[int]) -> None:
    """Let views read copies in order of what they read; `positions` are those of the views in the graph."""
    again: set[fx.Node] = set()
    for position, node in enumerate(list(graph.nodes)):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if position in positions:
            with graph.inserting_before(node):
                copy = graph.call_function(_CLONE, (source,), {"memory_format": torch.contiguous_format})
            copy.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            copy.meta["val"] = source.meta["val"].clone(memory_format=torch.contiguous_format)
            node.replace_input_with(source, copy)
            again.add(node)
        elif source in again and _is_view(node):
            again.add(node)
        if node in again:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)


def _calls(graph: fx.Graph) -> Iterator[_Call]:
    """Yield the calls that compute, and the outputs as one more; sources have negative numbers as makers."""
    made: dict[fx.Node, _Read] = {}
    count, sources, numbered = 0, 0, 0
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.op in ("placeholder", "get_attr"):
            sources += 1
            made[node] = _Read((-sources, 0))
        elif node.target is operator.getitem and isinstance(first, fx.Node):
            before, item = made[first], node.args[1]
            followed = bool(before.way) or before.maker[0] < 0
            made[node] = before.by(f"item {item}", node) if followed else _Read((before.maker[0], item))
        elif node.target == _CLONE and node.kwargs == _IN_ORDER and isinstance(first, fx.Node):
            made[node] = made[first].by(_COPY, node)
        elif node.target is _aten.detach.default and isinstance(first, fx.Node):
            made[node] = made[first]
        elif _is_view(node) and isinstance(first, fx.Node):
            step = (
                f"view{tuple(node.meta['val'].shape)}"
                if node.target in _VIEWS
                else f"{node.target}{node.args[1:]}{node.kwargs}"
            )
            made[node] = made[first].by(step, node)
        else:
            by_training = str(node.target) in BY_TRAINING
            arguments = (_without_training(node), node.kwargs) if by_training else (node.args, node.kwargs)
            nodes = [item for item in pytree.tree_leaves(arguments) if isinstance(item, fx.Node)]
            others = pytree.tree_map(lambda item: "%" if isinstance(item, fx.Node) else item, arguments)
            reads = tuple(replace(made[n], strides=_strides(n)) for n in nodes)
            writes = bool(node.op == "call_function" and node.target._schema.is_mutable)
            yield _Call(f"{node.target}{others}", reads, writes, numbered if by_training else None)
            made[node] = _Read((count, 0))
            count, numbered = count + 1, numbered + by_training


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or bool(getattr(node.target, "is_view", False))


def _without_training(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments but those that differ between the traces."""
    *others, _, deciders, _ = node.args
    return (*others, deciders)


def _strides(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else ()
