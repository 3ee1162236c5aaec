"""An H-Graph: a small graph whose compute nodes may stand for whole subgraphs (thesis 3.2.1, 3.4.1), and its schedules.

Indices are positions: node `k` is `nodes[k]`, value `d` is `values[d]`, cluster `j` is `clusters[j]`. Sizes are bytes,
times seconds.

Only what the graph lists is counted: values (aNodes), phantoms, and what a node keeps by itself while it runs. What is
resident outside (parameters, the input of the whole graph) does not appear.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class HValue:
    """A value between nodes (aNode): one storage, or several that are made and freed together."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class HStep:
    """A moment inside the schedule that a node stands for (thesis 3.4.4.1).

    Attributes:
        internal_bytes: what the node keeps by itself: temporaries, and its phantom as far as it is in memory.
        unborn: values the node makes that are not in memory yet, unless they were before it started; ascending.
        released: values the node reads or makes that it has touched for the last time; they are in memory now only if
            another node needs them later; ascending.
        phantom_released_bytes: in backward, bytes of the phantom that this schedule has freed by now; they are still
            there if the phantom is kept for another run.
    """

    internal_bytes: int
    unborn: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    phantom_released_bytes: int = 0


@dataclass(frozen=True)
class HRun:
    """One way to execute a node.

    Attributes:
        time_s: seconds.
        steps: moments in order of time, at least one; `unborn` only shrinks and `released` only grows.
        reads: values read in this way alone, besides the node's own (thesis 3.4.1.2.1); ascending.
    """

    time_s: float
    steps: tuple[HStep, ...] = (HStep(0),)
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class HOption:
    """A schedule of a cluster: what forward saves for backward, and what each part costs.

    Attributes:
        name: for people.
        phantom_bytes: bytes that forward saves for backward besides the values between nodes.
        forward, backward: the two parts.
    """

    name: str
    phantom_bytes: int
    forward: HRun
    backward: HRun


@dataclass(frozen=True)
class HNode:
    """A compute node (cNode).

    Attributes:
        name: for people.
        reads: values that must be complete and in memory in whichever way it runs; ascending.
        makes: values it contributes to; ascending. A value is complete when all its contributors have run; each adds
            to what the others have made.
        plain: the run that leaves no phantom: the only run of a node without a cluster, fast-forward of a cluster's
            forward node. Backward nodes of clusters have none.
        once: may run only once.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    plain: HRun | None = None
    once: bool = False


@dataclass(frozen=True)
class HCluster:
    """A forward node, its backward node, and the options they share (an H-Cluster)."""

    forward: int
    backward: int
    options: tuple[HOption, ...]


@dataclass(frozen=True)
class HGraph:
    """Nodes in topological order: forward, the loss node, backward.

    Attributes:
        nodes: every node.
        loss: position of the loss node: it reads what leaves forward, makes what arrives for backward, and stands for
            the rest of the chain; what is in memory when it runs is what this graph saves.
        values: every value; each has a contributor.
        clusters: the pairs; a node is in at most one. Others run by themselves (`HNode.plain`).
        final: values in memory at the end; nothing else is.
    """

    nodes: tuple[HNode, ...]
    loss: int
    values: tuple[HValue, ...]
    clusters: tuple[HCluster, ...]
    final: tuple[int, ...]

    def runs(self, node: int) -> dict[int | None, HRun]:
        """Return the runs of a node by option; the key None is the plain run."""
        found: dict[int | None, HRun] = {}
        for cluster in self.clusters:
            if cluster.forward == node:
                found.update((o, option.forward) for o, option in enumerate(cluster.options))
            if cluster.backward == node:
                found.update((o, option.backward) for o, option in enumerate(cluster.options))
        plain = self.nodes[node].plain
        if plain is not None:
            found[None] = plain
        return found

    def check(self) -> None:
        """Raise ValueError, in one sentence, where this is no H-Graph."""
        made: set[int] = set()
        for k, node in enumerate(self.nodes):
            made.update(node.makes)
            runs = self.runs(k)
            if not runs:
                raise ValueError(f"node {k} ({node.name}) has no way to run: give it options or a plain run")
            for run in runs.values():
                _check_run(k, node, run)
        late = [
            (k, d)
            for k, node in enumerate(self.nodes)
            for d in {*node.reads, *(d for run in self.runs(k).values() for d in run.reads)}
            for c, other in enumerate(self.nodes)
            if d in other.makes and c >= k
        ]
        if late:
            raise ValueError(f"node {late[0][0]} reads value {late[0][1]}, to which a later node contributes")
        if made != set(range(len(self.values))):
            raise ValueError(f"values {sorted(made ^ set(range(len(self.values))))} have no contributor")
        self._check_clusters()

    def _check_clusters(self) -> None:
        seen: set[int] = set()
        for j, cluster in enumerate(self.clusters):
            if not cluster.forward < self.loss < cluster.backward < len(self.nodes):
                raise ValueError(f"cluster {j} does not have its forward node before the loss and its backward after")
            if not cluster.options or seen & {cluster.forward, cluster.backward}:
                raise ValueError(f"cluster {j} has no options, or a node of another cluster")
            if self.nodes[cluster.backward].plain is not None:
                raise ValueError(f"backward node {cluster.backward} of cluster {j} can only run with an option")
            seen |= {cluster.forward, cluster.backward}

    def content_hash(self) -> str:
        """Hash structure, bytes and times; names are left out, so identical clusters have equal hashes."""
        text = json.dumps(_nameless(asdict(self)), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class HAction:
    """One row of a schedule.

    Attributes:
        kind: compute a node, free a value, or free the phantom of a cluster.
        index: the node, value or cluster.
        option: for compute, the option; None is the plain run.
    """

    kind: Literal["compute", "free", "free_phantom"]
    index: int
    option: int | None = None


@dataclass(frozen=True)
class HSchedule:
    """The rows of a schedule in order, the loss node's among them.

    What is freed directly after a node is freed as early as that node's steps allow.
    """

    actions: tuple[HAction, ...]


def _check_run(k: int, node: HNode, run: HRun) -> None:
    touched = {*node.reads, *run.reads, *node.makes}
    if not run.steps:
        raise ValueError(f"node {k} ({node.name}) has a way without steps")
    for step in run.steps:
        if not set(step.unborn) <= set(node.makes) or not set(step.released) <= touched:
            raise ValueError(f"node {k} ({node.name}) has a step that names values it does not touch")
        if set(step.unborn) & set(step.released):
            raise ValueError(f"node {k} ({node.name}) is done with a value that it has not made yet")
    for before, after in zip(run.steps, run.steps[1:]):
        if not set(after.unborn) <= set(before.unborn) or not set(before.released) <= set(after.released):
            raise ValueError(f"node {k} ({node.name}) has steps that are not in order of time")


def _nameless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _nameless(item) for key, item in tree.items() if key != "name"}
    if isinstance(tree, (list, tuple)):
        return [_nameless(item) for item in tree]
    return tree
