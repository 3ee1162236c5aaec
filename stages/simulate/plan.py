"""The referee for a whole plan: legality, memory and time by plain replay. Shares no code with any solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stowage.stages.ir.errors import IllegalPlanError, Occupant
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.trace import Storage

RANDOM_STATE_BYTES = 5056
"""Size of a saved state of the CPU generator (mt19937), kept for each random node that runs again."""


@dataclass(frozen=True)
class Step:
    """One action before it is timed: `node` to compute, or `storage` to free; the other is -1."""

    node: int
    storage: int
    label: str


@dataclass(frozen=True)
class Outcome:
    """What a plan does.

    Attributes:
        rows: the plan with predicted times and bytes.
        peak_bytes: highest device bytes, everything included.
        peak_row: the row at which it is reached.
        baseline_bytes: persistent storages.
        time_s: end of the last row.
        once_time_s: time of all nodes executed once: a lower bound.
        recomputed_bytes: bytes of distinct activations (forward makes, backward reads) that were made more than once.
        activation_bytes: bytes of storages that forward makes and backward reads.
        occupants: what is in memory at the peak, largest first.
    """

    rows: list[PlanRow]
    peak_bytes: int
    peak_row: int
    baseline_bytes: int
    time_s: float
    once_time_s: float
    recomputed_bytes: int
    activation_bytes: int
    occupants: list[Occupant]


def baseline_bytes(storages: Sequence[Storage]) -> int:
    """Bytes of everything that is in memory before and after an iteration."""
    return sum(s.nbytes for s in storages if s.role != "temporary")


def replay_plan(
    storages: Sequence[Storage],
    nodes: Sequence[ComputeNode],
    steps: Iterable[Step],
    *,
    keep: frozenset[int] = frozenset(),
    budget_bytes: int | None = None,
) -> Outcome:
    """Replay a plan.

    Args:
        storages, nodes: the program.
        steps: the plan.
        keep: temporary storages that must be in memory at the end (the loss, gradients left in `.grad`).
        budget_bytes: reject the plan if any row exceeds it.

    Raises:
        IllegalPlanError: at the first row that reads what is not in memory or no longer what it was, makes what is
            still in memory, runs a run-once node again, draws first random numbers out of order, or exceeds the
            budget; or when nodes never ran or the end is not clean.
    """
    steps = list(steps)
    size = [s.nbytes for s in storages]
    temporary = [s.role == "temporary" for s in storages]
    base = sum(n for n, t in zip(size, temporary) if not t)
    runs = [0] * len(nodes)
    total_runs = [0] * len(nodes)
    for step in steps:
        if step.node >= 0:
            total_runs[step.node] += 1
    live: set[int] = set()
    version: dict[int, int] = {}
    seen: dict[int, dict[int, int]] = {}
    made: set[int] = set()
    again: set[int] = set()
    random_seen = -1
    used, clock = base, 0.0
    peak, peak_row, at_peak = base, 0, set[int]()
    rows: list[PlanRow] = []
    for number, step in enumerate(steps):
        where = f"row {number} ({step.label})"
        if step.node < 0:
            storage = step.storage
            if storage not in live:
                raise IllegalPlanError(f"{where} frees {storages[storage].name}, which is not in memory")
            live.discard(storage)
            used -= size[storage]
            rows.append(PlanRow(number, "free", -1, storage, -1, step.label, False, clock, clock, used, used))
            continue
        node = nodes[step.node]
        first = runs[node.node] == 0
        for storage in node.reads:
            if temporary[storage] and storage not in live:
                raise IllegalPlanError(f"{where} node {node.name} reads {storages[storage].name}, not in memory")
        current = {s: version.get(s, 0) for s in node.reads if not temporary[s] and s not in node.mutates}
        if first:
            seen[node.node] = current
        elif seen[node.node] != current:
            raise IllegalPlanError(f"{where} node {node.name} runs again after something it reads was updated")
        if node.once and not first:
            raise IllegalPlanError(f"{where} node {node.name} may run only once")
        if node.random and first:
            if node.node < random_seen:
                raise IllegalPlanError(f"{where} node {node.name} draws random numbers out of order")
            random_seen = node.node
            if total_runs[node.node] > 1:
                used += RANDOM_STATE_BYTES
        for storage in node.creates:
            if storage in live:
                raise IllegalPlanError(f"{where} node {node.name} makes {storages[storage].name}, still in memory")
            live.add(storage)
            used += size[storage]
            if storage in made and node.phase == "forward":
                again.add(storage)
            made.add(storage)
        if first:
            for storage in node.mutates:
                version[storage] = version.get(storage, 0) + 1
        runs[node.node] += 1
        high = used + node.workspace_bytes
        if high > peak:
            peak, peak_row, at_peak = high, number, set(live)
        if budget_bytes is not None and high > budget_bytes:
            raise IllegalPlanError(f"{where} node {node.name} needs {high} bytes, above the budget of {budget_bytes}")
        if node.random and not first and runs[node.node] == total_runs[node.node]:
            used -= RANDOM_STATE_BYTES
        end = clock + node.time_s
        rows.append(
            PlanRow(number, "compute", node.node, -1, node.block, step.label, not first, clock, end, used, high)
        )
        clock = end
    never = [n.name for n in nodes if not runs[n.node]]
    if never:
        raise IllegalPlanError(f"{len(never)} nodes never run, such as {never[0]}")
    if live != keep:
        names = [storages[s].name for s in sorted(live ^ keep)]
        raise IllegalPlanError(f"the iteration ends with the wrong storages in memory: {names[:5]}")
    backward_reads = {s for n in nodes if n.phase != "forward" for s in n.reads}
    activations = {s for n in nodes if n.phase == "forward" for s in n.creates} & backward_reads
    return Outcome(
        rows=rows,
        peak_bytes=peak,
        peak_row=peak_row,
        baseline_bytes=base,
        time_s=clock,
        once_time_s=sum(n.time_s for n in nodes),
        recomputed_bytes=sum(size[s] for s in again & activations),
        activation_bytes=sum(size[s] for s in activations),
        occupants=sorted(
            [Occupant(storages[s].name, size[s]) for s in at_peak]
            + [Occupant(s.name, s.nbytes) for s in storages if s.role != "temporary"],
            key=lambda o: (-o.nbytes, o.name),
        ),
    )
