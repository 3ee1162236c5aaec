"""Writes calls as a step has them: Python that calls one operator after the other, with no clock between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodDescriptorType
from typing import Any

from torch import fx

from stowage.stages.ir.results import places
from stowage.stages.profile.line import Line, reads_of, resolve


@dataclass(frozen=True)
class Written:
    """A function that makes several calls.

    Attributes:
        reads: values that are its arguments.
        function: returns the values that outlive it; others are freed after their last use.
    """

    reads: tuple[int, ...]
    function: Callable[..., tuple[Any, ...]]


def write(lines: Sequence[Line]) -> Written:
    """Return the function that makes the calls of `lines`, none of which is opaque."""
    made = [value for line in lines for value in line.returns if value >= 0]
    dead = {value for line in lines for value in line.dead}
    reads = tuple(sorted({value for line in lines for value in reads_of(line)}.difference(made)))
    graph = fx.Graph()
    at: dict[int, Any] = {value: graph.placeholder(f"v{value}") for value in reads}
    for line in lines:
        args = tuple(resolve(a, at) for a in line.args)
        kwargs = {name: resolve(a, at) for name, a in line.kwargs.items()}
        if isinstance(line.kernel, MethodDescriptorType):  # methods of tensors
            node = graph.call_method(line.kernel.__name__, args, kwargs)
        else:
            node = graph.call_function(line.kernel, args, kwargs)
        lists: dict[int, fx.Node] = {}
        for (position, *inside), value in zip(places(line.groups, len(line.returns)), line.returns, strict=True):
            if value < 0:
                continue
            at[value] = node
            if line.many:
                at[value] = lists.get(position) or graph.call_function(operator.getitem, (node, position))
            for index in inside:
                lists[position] = at[value]
                at[value] = graph.call_function(operator.getitem, (at[value], index))
    graph.output(tuple(at[value] for value in made if value not in dead))
    return Written(reads, fx.GraphModule({}, graph).forward)
