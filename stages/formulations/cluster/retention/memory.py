"""The budgets of the model in `model.py`."""

from __future__ import annotations

from typing import Any

from stowage.stages.formulations.block.staged_order import units
from stowage.stages.formulations.cluster.retention.model import ClusterRun, HRetentionModel


def add_peak(model: HRetentionModel, peak: Any) -> None:
    """Keep values, phantoms, and what nodes keep by themselves within M_peak at every slot."""
    intervals: list[Any] = []
    demands: list[int] = []
    for part in (_values, _phantoms, _internal):
        for interval, nbytes in part(model):
            intervals.append(interval)
            demands.append(units(nbytes, model.unit))
    model.cp.add_cumulative(intervals, demands, peak)


def _values(model: HRetentionModel) -> list[tuple[Any, int]]:
    found = []
    for (g, m), end in sorted(model.ends.items()):
        group = model.groups[g]
        if not group.nbytes:
            continue
        k = group.contributors[0]
        run, name = model.runs[k][m], f"copy[{g},{m}]"
        births = [way.birth(group.value) for way in model.data.ways[k]]
        if len(set(births)) == 1:
            start = run.start + births[0]
        else:
            start = model.cp.new_int_var(0, model.horizon, f"b[{g},{m}]")
            model.cp.add(start == run.start + sum(birth * model.ways[k, m, w] for w, birth in enumerate(births)))
            model.starts[g, m] = start
        size = model.cp.new_int_var(0, model.horizon, f"d[{g},{m}]")
        found.append((_interval(model, run, start, size, end, name), group.nbytes))
    return found


def _phantoms(model: HRetentionModel) -> list[tuple[Any, int]]:
    """Return intervals of phantoms from the end of the forward to the start of backward, whose steps count the rest."""
    found = []
    for j, cluster in enumerate(model.data.graph.clusters):
        end = model.first(cluster.backward)
        for m, run in enumerate(model.runs[cluster.forward]):
            for o, option in enumerate(cluster.options):
                if not option.phantom_bytes:
                    continue
                name, steps = f"phantom[{j},{m},{o}]", len(model.data.ways[cluster.forward][o].steps)
                chosen = model.ways[cluster.forward, m, o]
                start = run.start + steps
                size = model.cp.new_int_var(0, model.horizon, f"p[{j},{m},{o}]") if m else end - start
                interval = model.cp.new_optional_interval_var(start, size, end, chosen, name)
                found.append((interval, option.phantom_bytes))
    return found


def _internal(model: HRetentionModel) -> list[tuple[Any, int]]:
    found = []
    for (k, m, w), chosen in model.ways.items():
        for i, step in enumerate(model.data.ways[k][w].steps):
            if step.internal_bytes:
                start = model.runs[k][m].start + i
                interval = model.cp.new_optional_interval_var(start, 1, start + 1, chosen, f"work[{k},{m},{w},{i}]")
                found.append((interval, step.internal_bytes))
    return found


def _interval(model: HRetentionModel, run: ClusterRun, start: Any, size: Any, end: Any, name: str) -> Any:
    if run.present is None:
        return model.cp.new_interval_var(start, size, end, name)
    return model.cp.new_optional_interval_var(start, size, end, run.present, name)


def add_save(model: HRetentionModel, save: int) -> None:
    """Keep the memory at the loss, without what the loss makes, within M_save."""
    cp, graph = model.cp, model.data.graph
    slot = model.first(graph.loss)
    terms: list[Any] = []
    for g, group in enumerate(model.groups):
        if group.contributors[0] >= graph.loss or not group.nbytes:
            continue
        saved_at_loss = cp.new_bool_var(f"save[{g}]")
        for m, run in enumerate(model.runs[group.contributors[0]]):
            released = cp.new_bool_var(f"released[{g},{m}]")
            cp.add(model.ends[g, m] <= slot).only_enforce_if(released)
            if run.present is None:
                cp.add_bool_or(saved_at_loss, released)
                continue
            cp.add_bool_or(saved_at_loss, released, _later(model, group.contributors[0], m), ~run.present)
        model.saved[g] = saved_at_loss
        terms.append(units(group.nbytes, model.unit) * saved_at_loss)
    for j, cluster in enumerate(graph.clusters):
        for m in range(len(model.runs[cluster.forward])):
            for o, option in enumerate(cluster.options):
                if option.phantom_bytes:
                    terms.append(units(option.phantom_bytes, model.unit) * _phantom_at_loss(model, j, m, o))
    cp.add(sum(terms) <= save)


def _later(model: HRetentionModel, k: int, m: int) -> Any:
    """Return whether run m of node k is after the loss."""
    if (k, m) not in model.later:
        model.later[k, m] = model.cp.new_bool_var(f"later[{k},{m}]")
        loss, stage = model.data.graph.loss, model.runs[k][m].stage
        model.cp.add(stage > loss).only_enforce_if(model.later[k, m])
        model.cp.add(stage <= loss).only_enforce_if(~model.later[k, m])
    return model.later[k, m]


def _phantom_at_loss(model: HRetentionModel, j: int, m: int, o: int) -> Any:
    forward = model.data.graph.clusters[j].forward
    chosen = model.ways[forward, m, o]
    if m == 0:
        return chosen
    saved_at_loss = model.cp.new_bool_var(f"save_phantom[{j},{m},{o}]")
    model.cp.add_bool_or(saved_at_loss, ~chosen, _later(model, forward, m))
    model.phantom_saved[j, m, o] = saved_at_loss
    return saved_at_loss
