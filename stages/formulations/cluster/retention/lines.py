"""Linear constraints that follow from the model in `model.py` and give its relaxation a bound.

`cumulative` alone bounds the time weakly. The memory when a node beyond the loss first runs, in a slot known
beforehand, is linear: what its own way takes, the phantoms that others left, the values kept across it.
"""

from __future__ import annotations

from typing import Any

from stowage.stages.formulations.block.staged_order import units
from stowage.stages.formulations.cluster.problem import ClusterWay
from stowage.stages.formulations.cluster.retention.model import HRetentionModel


def add_lines(model: HRetentionModel, peak: int) -> None:
    """Add one constraint for the loss and for each node beyond it."""
    retained_now = _Retained(model)
    for r in range(model.data.graph.loss, model.data.size):
        terms = [_own(model, r, way) * model.ways[r, 0, w] for w, way in enumerate(model.data.ways[r])]
        touched = set(model.data.related(r))
        for g, group in enumerate(model.groups):
            if group.nbytes and not touched & set(group.values):
                terms.extend(units(group.nbytes, model.unit) * literal for literal in retained_now.values(g, r))
        for j, cluster in enumerate(model.data.graph.clusters):
            if cluster.backward > r:
                terms.extend(retained_now.phantoms(j, r))
        model.cp.add(sum(terms) <= peak)


def _own(model: HRetentionModel, r: int, way: ClusterWay) -> int:
    """Return the most that node r needs at a step of a way.

    That is what it keeps by itself, what it reads and still needs, and what it has made by then.
    """
    found = 0
    for step in way.steps:
        there = {*way.reads, *model.data.graph.nodes[r].makes} - set(step.released) - set(step.unborn)
        found = max(
            found, units(step.internal_bytes, model.unit) + sum(model.data.nbytes[d] // model.unit for d in there)
        )
    return found


class _Retained:
    """Makes literals for what is in memory when a node first runs, or for a simple part of it."""

    def __init__(self, model: HRetentionModel) -> None:
        self.model = model
        self.before: dict[tuple[int, int, int], Any] = {}

    def values(self, g: int, r: int) -> list[Any]:
        """Return literals for the copies of a group in memory before and after the slot in which node r first runs."""
        model, group = self.model, self.model.groups[g]
        slot, k = model.first(r), group.contributors[0]
        if k >= r or not (group.final or any(reader > r for reader in group.readers)):
            return []
        retained_now = model.cp.new_bool_var(f"retained[{g},{r}]")
        model.cp.add(model.ends[g, 0] <= slot).only_enforce_if(~retained_now)
        for reader in group.readers:
            if reader > r and (reader, 0, k, 0) in model.reads:
                for w, way in enumerate(model.data.ways[reader]):
                    if group.value in way.reads:
                        served = model.reads[reader, 0, k, 0]
                        model.cp.add_bool_or(retained_now, ~served, ~model.ways[reader, 0, w])
        return [retained_now]

    def phantoms(self, j: int, r: int) -> list[Any]:
        """Return the phantoms of cluster j that were left before node r first runs and are taken after it."""
        model, cluster = self.model, self.model.data.graph.clusters[j]
        found = []
        for m in range(len(model.runs[cluster.forward])):
            for o, option in enumerate(cluster.options):
                if not option.phantom_bytes:
                    continue
                chosen = model.ways[cluster.forward, m, o]
                if m:
                    both = model.cp.new_bool_var(f"left[{j},{m},{o},{r}]")
                    model.cp.add_bool_or(both, ~chosen, ~self._early(cluster.forward, m, r))
                    chosen = both
                found.append(units(option.phantom_bytes, model.unit) * chosen)
        return found

    def _early(self, k: int, m: int, r: int) -> Any:
        """Return whether run m of node k is before the first run of node r > k."""
        model = self.model
        if (k, m, r) not in self.before:
            literal = model.cp.new_bool_var(f"early[{k},{m},{r}]")
            stage = model.runs[k][m].stage
            model.cp.add(stage <= r).only_enforce_if(literal)
            model.cp.add(stage > r).only_enforce_if(~literal)
            self.before[k, m, r] = literal
        return self.before[k, m, r]
