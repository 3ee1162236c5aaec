"""Constraints of H-ILP, numbered as in the thesis (3.4.3, 3.4.4); symbols are in `model.py`.

3.20 and 3.27 to 3.32 define aliases: A is `HIlp.alive`; U is a variable that `memory_in_use` ties to 3.27–3.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stowage.stages.formulations.block.staged_order import units
from stowage.stages.formulations.cluster.h_ilp.model import HIlp, Objective
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.solver.equations import Constraints, add_equations
from stowage.stages.solver.milp import pulp


def eq_3_4(m: HIlp) -> Constraints:
    """Run no node beyond t in stage t."""
    for t in range(m.T - 1):
        yield f"{t}", pulp.lpSum(m.sum_comp(t, k) for k in range(t + 1, m.T)) == 0


def eq_3_5(m: HIlp) -> Constraints:
    """Save no phantom before its forward has run, nor after the last stage.

    The thesis writes F_j > t, which leaves a phantom of node t, or of node 0 before stage 0, free of charge; it must be
    F_j ≥ t.
    """
    for j, cluster in enumerate(m.data.graph.clusters):
        for o in range(len(cluster.options)):
            yield f"{j}_{o}", pulp.lpSum(m.Sp[t, j, o] for t in range(cluster.forward + 1)) == 0
            yield f"end_{j}_{o}", m.Sp[m.T, j, o] == 0


def eq_3_6(m: HIlp) -> Constraints:
    """Save no contribution before its node has run."""
    for d in range(len(m.data.nbytes)):
        for k in m.makers(d):
            yield f"{k}_{d}", pulp.lpSum(m.S[t, k, d] for t in range(k + 1)) == 0


def eq_3_7(m: HIlp) -> Constraints:
    """Keep no value in memory before its first contributor has run."""
    for d in range(len(m.data.nbytes)):
        yield f"{d}", pulp.lpSum(m.P[t, d] for t in range(min(m.makers(d)) + 1)) == 0


def eq_3_8(m: HIlp) -> Constraints:
    """Keep final values complete and in memory after the last stage, and nothing else.

    The thesis asks that they be saved before the last stage or computed in it, which lets them be deleted in it.
    """
    final = set(m.data.graph.final)
    for d in range(len(m.data.nbytes)):
        yield f"in_memory_{d}", m.P[m.T, d] == int(d in final)
        for k in m.makers(d):
            yield f"{k}_{d}", m.S[m.T, k, d] == int(d in final)


def eq_3_9(m: HIlp) -> Constraints:
    """Run node t in stage t."""
    for t in range(m.T):
        yield f"{t}", m.sum_comp(t, t) == 1


def eq_3_10(m: HIlp) -> Constraints:
    """Run the loss, and every other `once` node, once."""
    for k in range(m.T):
        if m.data.once(k):
            yield f"{k}", pulp.lpSum(m.sum_comp(t, k) for t in range(m.T)) == 1


def eq_3_11(m: HIlp) -> Constraints:
    """Keep a value with a contribution in memory."""
    for t, k, d in m.S:
        yield f"{t}_{k}_{d}", m.S[t, k, d] <= m.P[t, d]


def eq_3_12(m: HIlp) -> Constraints:
    """Save a contribution only if it was saved, or its node has just run."""
    for t, k, d in m.S:
        if t < m.T:
            yield f"{t}_{k}_{d}", m.S[t + 1, k, d] <= m.S[t, k, d] + m.sum_comp(t, k)


def eq_3_13(m: HIlp) -> Constraints:
    """Give a node all contributions to what it reads in every way, saved or made in the same stage."""
    for t, r in m.stages_and_nodes:
        for d in m.data.graph.nodes[r].reads:
            for k in m.makers(d):
                yield f"{t}_{r}_{k}_{d}", m.sum_comp(t, r) <= m.sum_comp(t, k) + m.S[t, k, d]


def eq_3_14(m: HIlp) -> Constraints:
    """Give a node all contributions to what it reads only in some ways."""
    for t, r in m.stages_and_nodes:
        for w, way in enumerate(m.data.ways[r]):
            for d in sorted(set(way.reads) - set(m.data.graph.nodes[r].reads)):
                for k in m.makers(d):
                    yield f"{t}_{r}_{w}_{k}_{d}", m.Comp[t, r, w] <= m.sum_comp(t, k) + m.S[t, k, d]


def eq_3_15(m: HIlp) -> Constraints:
    """Run a node in one way."""
    for t, k in m.stages_and_nodes:
        yield f"{t}_{k}", m.sum_comp(t, k) <= 1


def eq_3_16(m: HIlp) -> Constraints:
    """Keep at most one phantom of a cluster in memory."""
    for t in range(m.T + 1):
        for j, cluster in enumerate(m.data.graph.clusters):
            yield f"{t}_{j}", pulp.lpSum(m.Sp[t, j, o] for o in range(len(cluster.options))) <= 1


def eq_3_17(m: HIlp) -> Constraints:
    """Save a phantom only from its forward."""
    for t, j, o in m.Sp:
        if t < m.T:
            forward = m.option(t, m.data.graph.clusters[j].forward, o)
            yield f"{t}_{j}_{o}", m.Sp[t + 1, j, o] <= m.Sp[t, j, o] + forward


def eq_3_18(m: HIlp) -> Constraints:
    """Free a phantom with its backward alone."""
    for t, j, o in m.Sp:
        if t < m.T:
            c = m.data.graph.clusters[j]
            made, used = m.option(t, c.forward, o), m.option(t, c.backward, o)
            yield f"{t}_{j}_{o}", m.Sp[t + 1, j, o] >= m.Sp[t, j, o] + made - used


def eq_3_19(m: HIlp) -> Constraints:
    """Give backward the phantom of its option, saved or made in the same stage."""
    for t, j, o in m.Sp:
        if t < m.T:
            c = m.data.graph.clusters[j]
            yield f"{t}_{j}_{o}", m.option(t, c.backward, o) <= m.Sp[t, j, o] + m.option(t, c.forward, o)


def eq_3_21(m: HIlp) -> Constraints:
    """Require A ∈ {0, 1}."""
    for t, k, d in m.D:
        yield f"low_{t}_{k}_{d}", m.alive(t, k, d) >= 0
        yield f"high_{t}_{k}_{d}", m.alive(t, k, d) <= 1


def eq_3_22(m: HIlp) -> Constraints:
    """Keep in memory what has been made and not deleted."""
    for t, k, d in m.C:
        yield f"{t}_{k}_{d}", m.alive(t, k, d) >= m.sum_comp(t, k) - m.D[t, k, d]


def eq_3_23(m: HIlp) -> Constraints:
    """Create only by a node that runs."""
    for t, k, d in m.C:
        yield f"{t}_{k}_{d}", m.C[t, k, d] <= m.sum_comp(t, k)


def eq_3_24(m: HIlp) -> Constraints:
    """Start a stage with what is in memory after the last related step of the stage before.

    This holds after the last stage too (3.8 needs it).
    """
    for t in range(m.T):
        for d in range(len(m.data.nbytes)):
            steps = m.related(t, d)
            if steps:
                yield f"{t}_{d}", m.P[t + 1, d] == m.alive(t, steps[-1], d)


def eq_3_25(m: HIlp) -> Constraints:
    """Delete right after a step what nobody needs any more.

    The thesis writes P_k; it must be P_d. A reader counts in the ways that read d: 3.14's readers too, which the thesis
    leaves out here, could otherwise find it deleted.
    """
    for t, k, d in m.D:
        later = pulp.lpSum(m.reading(t, r, d) for r in m.readers(d) if k < r <= t)
        yield f"{t}_{k}_{d}", m.D[t, k, d] >= m.touching(t, k, d) - m.P[t + 1, d] - later


def eq_3_26(m: HIlp) -> Constraints:
    """Delete nothing else: h = 2 + later readers."""
    for t, k, d in m.D:
        readers = [r for r in m.readers(d) if k < r <= t]
        h = 2 + len(readers)
        later = pulp.lpSum(m.reading(t, r, d) for r in readers)
        hazards = 1 - m.touching(t, k, d) + m.P[t + 1, d] + later
        yield f"{t}_{k}_{d}", h * (1 - m.D[t, k, d]) >= hazards


def memory_in_use(m: HIlp) -> Constraints:
    """Define U from the step before (3.30–3.32).

    M_t counts before a stage (3.27), IF and IB after a step (3.28, 3.29); the loss and nodes without a cluster have no
    phantom term.
    """
    graph = m.data.graph
    for t, k in m.stages_and_nodes:
        if k:
            before = m.U[t, k - 1]
        else:
            saved = (
                m.phantom(j, o) * m.Sp[t, j, o] for j, c in enumerate(graph.clusters) for o in range(len(c.options))
            )
            before = pulp.lpSum(m.size(d) * m.P[t, d] for d in range(len(m.data.nbytes))) + pulp.lpSum(saved)
        made = pulp.lpSum(m.size(d) * m.C[t, k, d] for d in graph.nodes[k].makes)
        yield f"{t}_{k}", m.U[t, k] == before + made - _deleted(m, t, k) + _phantom_change(m, t, k)


def _phantom_change(m: HIlp, t: int, k: int) -> Any:
    j = m.data.cluster_of.get(k)
    if j is None:
        return 0
    c = m.data.graph.clusters[j]
    terms = []
    for o in range(len(c.options)):
        made = m.option(t, c.forward, o)
        terms.append(m.phantom(j, o) * (made if k == c.forward else m.Sp[t + 1, j, o] - made - m.Sp[t, j, o]))
    return pulp.lpSum(terms)


def _deleted(m: HIlp, t: int, k: int) -> Any:
    return pulp.lpSum(m.size(d) * m.D[t, k, d] for d in m.data.related(k))


def eq_3_33(m: HIlp) -> Constraints:
    """Limit memory while a node runs as if all it reads and makes were in memory all the time: without corrections.

    `_inside` defines the thesis' m for forward and for backward, where U has the phantom deducted already.
    """
    if not m.corrections:
        for t, k in m.stages_and_nodes:
            worst = []
            for w, way in enumerate(m.data.ways[k]):
                internal = max(units(step.internal_bytes, m.unit) for step in way.steps)
                released = max(units(step.phantom_released_bytes, m.unit) for step in way.steps)
                worst.append(_inside(m, t, k, w, internal, released))
            yield f"{t}_{k}", m.U[t, k] + pulp.lpSum(worst) + _deleted(m, t, k) <= m.limit


def eq_3_34(m: HIlp) -> Constraints:
    """Limit memory at every step of every way, without what is freed by then or not made yet (3.4.4.1).

    The thesis keeps the constraint of a way that does not run, as being weaker than 3.33. Without 3.33 it can be
    stronger than what the way that does run needs, so it is relaxed here by all that it would count too much.
    """
    if not m.corrections:
        return
    for t, k in m.stages_and_nodes:
        for w, way in enumerate(m.data.ways[k]):
            for i, step in enumerate(way.steps):
                inside = _inside(
                    m, t, k, w, units(step.internal_bytes, m.unit), units(step.phantom_released_bytes, m.unit)
                )
                less = pulp.lpSum(m.size(d) * m.D[t, k, d] for d in step.released)
                less += pulp.lpSum(m.size(d) * m.C[t, k, d] for d in step.unborn)
                others = len(m.data.ways[k]) > 1
                lift = sum(m.size(d) for d in m.data.related(k) if d not in step.released) if others else 0
                within = m.U[t, k] + inside + _deleted(m, t, k) - less
                yield f"{t}_{k}_{w}_{i}", within <= m.limit + lift * (m.sum_comp(t, k) - m.Comp[t, k, w])


def _inside(m: HIlp, t: int, k: int, w: int, internal: int, released: int) -> Any:
    """Return m[k,o,i], the memory that way w of node k needs at a step beyond what U counts after the node.

    Forward leaves its phantom in U; backward has taken it out of U, or keeps all of it there for another run.
    """
    way, j, comp = m.data.ways[k][w], m.data.cluster_of.get(k), m.Comp[t, k, w]
    if j is None or way.option is None:
        return internal * comp
    phantom = m.phantom(j, way.option)
    if k in m.data.forward_of:
        return (internal - phantom) * comp
    return internal * comp + min(0, released - phantom) * m.Sp[t + 1, j, way.option]


def eq_2_19(m: HIlp) -> Constraints:
    """Keep the memory at the loss, without what the loss makes, within M_save.

    It is from RK-Checkmate; 3.4 has no budget for it, and 2.6.0.0.1 gives one.
    """
    made = sum(m.size(d) for d in m.data.graph.nodes[m.loss].makes)
    yield "", m.U[m.loss, m.loss] + _deleted(m, m.loss, m.loss) <= m.save + made


def phantom_once(m: HIlp) -> Constraints:
    """Make no phantom while one of the same cluster is in memory: 3.18 would keep two in the place of one."""
    for t in range(m.T):
        for j, c in enumerate(m.data.graph.clusters):
            options = range(len(c.options))
            made = pulp.lpSum(m.option(t, c.forward, o) for o in options)
            yield f"{t}_{j}", made + pulp.lpSum(m.Sp[t, j, o] for o in options) <= 1


def added_once(m: HIlp) -> Constraints:
    """Add no contribution a second time where several nodes contribute to a value that is in memory.

    3.12 bounds S only from above, so S is made exact: what stays in memory keeps its contributions. (A sole contributor
    may run again: the old value is dropped first.)
    """
    for t in range(m.T):
        for d in range(len(m.data.nbytes)):
            for k in m.makers(d) if len(m.makers(d)) > 1 else ():
                if k <= t:
                    yield f"again_{t}_{k}_{d}", m.sum_comp(t, k) + m.S[t, k, d] <= 1
                    yield f"made_{t}_{k}_{d}", m.S[t + 1, k, d] >= m.sum_comp(t, k) + m.P[t + 1, d] - 1
                yield f"kept_{t}_{k}_{d}", m.S[t + 1, k, d] >= m.S[t, k, d] + m.P[t + 1, d] - 1


EQUATIONS: dict[str, Callable[[HIlp], Constraints]] = {
    "3.4": eq_3_4,
    "3.5": eq_3_5,
    "3.6": eq_3_6,
    "3.7": eq_3_7,
    "3.8": eq_3_8,
    "3.9": eq_3_9,
    "3.10": eq_3_10,
    "3.11": eq_3_11,
    "3.12": eq_3_12,
    "3.13": eq_3_13,
    "3.14": eq_3_14,
    "3.15": eq_3_15,
    "3.16": eq_3_16,
    "3.17": eq_3_17,
    "3.18": eq_3_18,
    "3.19": eq_3_19,
    "3.21": eq_3_21,
    "3.22": eq_3_22,
    "3.23": eq_3_23,
    "3.24": eq_3_24,
    "3.25": eq_3_25,
    "3.26": eq_3_26,
    "U": memory_in_use,
    "3.33": eq_3_33,
    "3.34": eq_3_34,
    "2.19": eq_2_19,
    "phantom_once": phantom_once,
    "added_once": added_once,
}
"""The function that writes each equation; constraints are named `eq_3_7_…`, or `U_…`, `phantom_once_…` and so on."""


def total_time(m: HIlp) -> Any:
    """Return the total time of all executions."""
    ways = m.data.ways
    return pulp.lpSum(way.time_s * m.Comp[t, k, w] for t, k in m.stages_and_nodes for w, way in enumerate(ways[k]))


def build(
    data: HProblem, peak_bytes: int, save_bytes: int, *, corrections: bool = True, minimise: Objective = "time"
) -> HIlp:
    """Build the whole model; the objective is 3.4.2.2 with one index for the node (not i and k), or the peak."""
    m = HIlp.of(data, peak_bytes, save_bytes, corrections=corrections, minimise=minimise)
    m.problem += (total_time(m), "time") if minimise == "time" else (m.limit, "peak")
    add_equations(m.problem, EQUATIONS, m)
    return m
