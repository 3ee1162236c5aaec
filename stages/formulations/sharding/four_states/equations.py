"""The rows of the exact choice (see `model` for symbols), and its objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from stowage.stages.formulations.sharding.four_states.memory_rows import SLACK, MemoryRow
from stowage.stages.formulations.sharding.four_states.model import Event, FourStates, Lane
from stowage.stages.formulations.sharding.memory import Key
from stowage.stages.solver.equations import Constraints, add_equations
from stowage.stages.solver.milp import pulp


def one_state(m: FourStates) -> Constraints:
    """Give every group one state: Σ_σ x[g,σ] = 1."""
    for i in range(len(m.problem.groups)):
        yield f"{i}", pulp.lpSum(m.state[i, s] for s in m.costs.states(i)) == 1


def device_memory(m: FourStates) -> Constraints:
    """Limit the bytes on a device at every moment: constant_k + Σ M[k,g,σ] x[g,σ] ≤ budget, up to a tolerance."""
    for row in m.device_rows:
        yield from _within(m, row)


def host_memory(m: FourStates) -> Constraints:
    """Limit the bytes in the host, of all ranks together, up to a tolerance."""
    for row in m.host_rows:
        yield from _within(m, row)


def _within(m: FourStates, row: MemoryRow) -> Constraints:
    """Keep a row within its limit and a tolerance, see `memory_rows`; what exceeds it alone is forbidden."""
    limit = max(row.limit, 0)
    alone = [m.state[key] for key, nbytes in row.items() if nbytes > limit]
    if row.limit < 0:
        yield f"{row.name}_never", pulp.lpSum(m.state[0, s] for s in m.costs.states(0)) <= 0
    if alone:
        yield f"{row.name}_alone", pulp.lpSum(alone) <= 0
    parts = [(nbytes, m.state[key]) for key, nbytes in row.items() if SLACK * limit <= nbytes <= limit]
    if parts and limit:
        yield row.name, pulp.lpSum(nbytes / limit * x for nbytes, x in parts) <= 1 + SLACK


def cover(m: FourStates, states: Sequence[frozenset[Key]]) -> Any:
    """Cut off an answer that exceeds a row of memory: Σ_g Σ_{σ that take as much} x[g,σ] ≤ number of groups − 1."""
    return pulp.lpSum(m.state[key] for own in states for key in sorted(own)) <= len(states) - 1


def reload_lane(m: FourStates) -> Constraints:
    """Copy shards one after the other, from the moment a use may be gathered: R[u] ≥ begin, R[u−1]; + r."""
    for u, reloaded in enumerate(m.reloaded):
        yield f"begin_{u}", reloaded >= m.begin(u) + m.lane_time(u, "reload")
        if u and not m.problem.machine.collectives_share_link:
            yield f"after_{u}", reloaded >= m.reloaded[u - 1] + m.lane_time(u, "reload")


def gather_lane(m: FourStates) -> Constraints:
    """Gather what is on the device: A[u] ≥ R[u] + g."""
    for u, gathered in enumerate(m.gathered):
        yield f"{u}", gathered >= m.reloaded[u] + m.lane_time(u, "gather")


def compute_lane(m: FourStates) -> Constraints:
    """Compute one use after the other, with gathered weights: C[u] ≥ W[u−1] + t, A[u] + t − late[u] · resting[u].

    What is neither copied nor gathered now does not wait for the link; late[u] is the most that this can be behind.
    """
    for u, computed in enumerate(m.computed):
        seconds = m.compute_time(u)
        yield f"gathered_{u}", computed >= m.gathered[u] + seconds - m.late(u) * m.resting(u)
        if u:
            yield f"after_{u}", computed >= m.free[u - 1] + seconds
        else:
            yield "first", computed >= seconds


def reduce_lane(m: FourStates) -> Constraints:
    """Reduce gradients that are computed: D[u] ≥ C[u] + d."""
    for u, reduced in enumerate(m.reduced):
        yield f"{u}", reduced >= m.computed[u] + m.lane_time(u, "reduce")


def offload_lane(m: FourStates) -> Constraints:
    """Copy reduced gradients to the host one after the other: O[u] ≥ D[u], O[u−1]; + o."""
    for u, offloaded in enumerate(m.offloaded):
        yield f"reduced_{u}", offloaded >= m.reduced[u] + m.lane_time(u, "offload")
        if u and not m.problem.machine.collectives_share_link:
            yield f"after_{u}", offloaded >= m.offloaded[u - 1] + m.lane_time(u, "offload")


def accumulation(m: FourStates) -> Constraints:
    """Let computing wait for offloads where there are micro-batches: W[u] ≥ C[u], O[u] − busy · (1 − offloads[u])."""
    if not m.waits:
        return
    busy = m.busy()
    for u in range(m.turn, len(m.uses)):
        yield f"computed_{u}", m.free[u] >= m.computed[u]
        yield f"offloaded_{u}", m.free[u] >= m.offloaded[u] - busy * (1 - m.offloads(u))


def one_link(m: FourStates) -> Constraints:
    """Do one collective after the other, in the order in which they are asked for; where they share it, copies too."""
    moments: dict[Lane, list[Any]] = {
        "reload": m.reloaded,
        "gather": m.gathered,
        "reduce": m.reduced,
        "offload": m.offloaded,
    }
    events = m.asked()

    def end(event: Event) -> Any:
        return moments[event.lane][event.use]

    for before, event in pairwise(events):
        yield f"{event.lane}_{event.use}", end(event) >= end(before) + m.lane_time(event.use, event.lane)


def all_ended(m: FourStates) -> Constraints:
    """End when every lane has ended, and not before both directions of the link have carried their bytes.

    Nor before the host has updated, where it does so beside computing.
    """
    for u in range(len(m.uses)):
        yield f"offloaded_{u}", m.end >= m.offloaded[u]
    yield "computed", m.end >= m.computed[-1]
    duplex = m.problem.machine.duplex_bytes_per_s * m.time_unit
    yield "duplex", m.end >= pulp.lpSum(m.costs.link_bytes(i, s) / duplex * x for (i, s), x in m.state.items())
    if m.problem.host_updates_beside:
        yield "host", m.end >= m.update_time(on_host=True)


EQUATIONS: dict[str, Callable[[FourStates], Constraints]] = {
    "one_state": one_state,
    "device_memory": device_memory,
    "host_memory": host_memory,
    "reload_lane": reload_lane,
    "gather_lane": gather_lane,
    "compute_lane": compute_lane,
    "reduce_lane": reduce_lane,
    "offload_lane": offload_lane,
    "accumulation": accumulation,
    "one_link": one_link,
    "all_ended": all_ended,
}
"""The function that writes each group of rows."""


def build(problem: FourStates) -> FourStates:
    """Add rows and objective: micro-batches · T + Σ (time of the update) x[g,σ].

    Updates that are beside computing are in T.
    """
    m = problem
    updates = m.update_time(on_host=False)
    if not m.problem.host_updates_beside:
        updates += m.update_time(on_host=True)
    m.model += m.problem.micro_batches * m.end + updates, "time"
    add_equations(m.model, EQUATIONS, m)
    return m
