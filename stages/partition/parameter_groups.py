"""Finds the parameters that are gathered together, and what their part of the step takes: Elixir's profile of a model.

It reads the trace alone, so that a model is profiled without being in memory. `group_members` says who belongs to which
group, `group_parts` what the calls of each take, `group_reductions` when FSDP2 reduces its gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition.group_members import Groups, Modules
from stowage.stages.partition.group_parts import parts_of_groups
from stowage.stages.partition.group_reductions import Reductions

__all__ = ["Modules", "parameter_groups"]


def parameter_groups(trace: TraceTables, costs: Mapping[str, Cost], modules: Modules) -> list[ParameterGroup]:
    """Return the groups in the order in which forward first uses them; the model's own comes first.

    Args:
        trace: the whole step; without updates the groups have no optimizer states.
        costs: costs by call signature.
        modules: the model's modules.

    Raises:
        TableError: a call of the trace has no cost.
    """
    groups = Groups(trace, modules)
    parts = parts_of_groups(trace, costs, groups)
    gradients = {g.parameter for g in trace.gradients if g.gradient_value >= 0}
    elements, stored = _parameter_sizes(trace)
    reductions = Reductions(groups, modules, gradients)
    states: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if storage.role == "state":
            states[storage.name.split("::", 1)[0]] += storage.nbytes
    rows = []
    for number, path in enumerate(groups.order):
        names = groups.members[path]
        trainable = [n for n in names if n in gradients]
        count = sum(elements[n] for n in names)
        learnt = sum(elements[n] for n in trainable)
        width = round(sum(stored[n] for n in names) / count) if count else 0
        part, segment = parts[path], _segment(path, modules.segments)
        again = part.forward_s if segment >= 0 else 0.0
        rows.append(
            ParameterGroup(
                group=number,
                modules=(path,),
                parameters=tuple(names),
                elements=count,
                trainable=learnt,
                stored_bytes=width,
                compute_bytes=width,
                state_bytes=round(sum(states[n] for n in trainable) / learnt) if learnt else 0,
                forward_s=part.forward_s,
                backward_s=part.backward_s + again,
                saved_bytes=(part.crossing if segment >= 0 else part.saved) + part.between,
                forward_peak_bytes=part.forward_peak,
                backward_peak_bytes=max(part.backward_peak, part.forward_peak if segment >= 0 else 0),
                segment=segment,
                backward_with_gradients_bytes=max(part.with_gradients, part.forward_peak if segment >= 0 else 0),
                first_saved_bytes=part.first_saved,
                entering_bytes=part.entering,
                incoming_bytes=part.incoming,
                leaving_bytes=part.leaving,
                end_peak_bytes=part.end_peak,
                last_trainable=elements[last] if (last := reductions.last(path)) else 0,
                after_root=reductions.after_root(path),
                idle_in_backward=reductions.is_idle(path),
            )
        )
    return rows


def _segment(path: str, segments: Mapping[str, int]) -> int:
    """Return the segment of a module or of the nearest module around it; -1 where there is none."""
    while path not in segments:
        if not path:
            return -1
        path = path.rpartition(".")[0]
    return segments[path]


def _parameter_sizes(trace: TraceTables) -> tuple[dict[str, int], dict[str, int]]:
    """Return the elements and the bytes of each parameter."""
    elements: dict[str, int] = {}
    stored: dict[str, int] = {}
    for value in trace.values:
        role, _, name = value.source.partition(":")
        if role == "parameter":
            count = 1
            for size in value.shape:
                count *= size
            elements[name] = count
            stored[name] = min(trace.storages[value.storage].nbytes, count * _width(value.dtype))
    return elements, stored


def _width(dtype: str) -> int:
    """Return the bytes of one element of a type such as `bfloat16`; types below a byte count as one."""
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(digits or 8) // 8)
