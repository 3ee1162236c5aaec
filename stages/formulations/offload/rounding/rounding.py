"""Rounds fractions to whole tensors (thesis 4.6, Algorithm 8), never using more memory than the fractions did.

Order: which tensors are updated on the CPU (SELECT); O-ILP again, with those and the options given, so that the
fractions of states fit the choice; Algorithm 8 for weights and for the states of the others; updates on the CPU in
order of increasing block, whose time between last gradient and first use is shortest; then `smoothing`.

Where this differs from Algorithm 8, and why:

- As printed it may leave a tensor offloaded in a step that needs it (`kept` is rounded in disfavour of presence, and
  nothing enforces 4.5). Here whatever is offloaded is reloaded in the step before a need; there is memory for it, since
  the fractions have the whole group there.
- SELECT for the CPU is done once for all groups in the thesis. Then a group may get fewer than its X_w, and its states,
  which must be on the device at g_w, more memory than it has. Here it is done group by group, what one gets too much or
  too little is carried to the next, and O-ILP is solved again.
- A tensor is released once between two needs, as soon as its copy in the lower tier is valid: later would only take
  memory.
- What would be offloaded but never dropped is not offloaded.
- The update of a tensor on the CPU may extend over several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stowage.stages.formulations.offload.o_ilp.answers import Fractions, OIlpSolution
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.formulations.offload.problem import OffloadProblem, ParameterGroup
from stowage.stages.formulations.offload.rounding.algorithm_8 import TOLERANCE, Algorithm8, leaves
from stowage.stages.formulations.offload.rounding.smoothing import fill_cpu, smooth
from stowage.stages.formulations.offload.rounding.subset_sum import select_at_least, select_at_most
from stowage.stages.formulations.offload.rounding.tensors import Item, Loads
from stowage.stages.solver.milp import MilpSolver
from stowage.stages.solver.outcome import SolverSettings


@dataclass(frozen=True)
class RoundedTransfers:
    """The transfers and updates of one step, by names of tensors.

    At its start `delete` and `delete_states` are dropped from the device, and what is in `reload` or `reload_states`
    for the first time since its drop gets device memory. During it (name, bytes) are reloaded and offloaded; usually
    all bytes of a tensor, but a transfer may extend over several steps: it begins with the first, and is over before
    the tensor is dropped or needed. The same holds for (name, share) of an `update` on the CPU, which is over before
    the reload begins. The results of a step's own updates are offloaded after them.

    A weight whose gradient is offloaded is dropped right after the step of its last gradient, in `delete` of the
    following step; its gradient takes its place until it is in the lower tier.
    """

    delete: tuple[str, ...] = ()
    reload: tuple[tuple[str, int], ...] = ()
    offload: tuple[tuple[str, int], ...] = ()
    offload_gradients: tuple[tuple[str, int], ...] = ()
    update: tuple[tuple[str, float], ...] = ()
    delete_states: tuple[str, ...] = ()
    reload_states: tuple[tuple[str, int], ...] = ()
    offload_states: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RoundedPlan:
    """A plan of whole tensors for the cycle of steps.

    Attributes:
        options: option of each block.
        steps: transfers and updates, one per step.
        resident, states_resident: on the device, or being reloaded, at the start of step 0 before its drops and
            allocations; equal to those at the end of the last step.
        on_cpu: updated on the CPU; their states are never on the device.
        on_disk: weights and states placed on the disk behind the host.
        memory_bytes, step_times_s: of each step (4.17; 4.19 to 4.23).
        objective_s: sum of the times.
        host_bytes, disk_bytes: room taken in the host and on the disk.
    """

    options: tuple[int, ...]
    steps: tuple[RoundedTransfers, ...]
    resident: frozenset[str]
    states_resident: frozenset[str]
    on_cpu: frozenset[str]
    on_disk: frozenset[str]
    memory_bytes: tuple[int, ...]
    step_times_s: tuple[float, ...]
    objective_s: float
    host_bytes: int
    disk_bytes: int


class Refits:
    """Solves O-ILP again with fewer choices, each linear program of one fractional solution once."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[float, ...], int], OIlpSolution | None] = {}

    def solution(
        self,
        problem: OffloadProblem,
        solution: OIlpSolution,
        on_cpu: Sequence[frozenset[str]],
        settings: SolverSettings,
        reach: int | None,
        solver: MilpSolver,
    ) -> OIlpSolution | None:
        """Return the solution with a solution's options, and with what the CPU updates given."""
        shares = tuple(
            sum(t.nbytes for t in group.tensors if t.name in names) / group.nbytes if group.nbytes else 0.0
            for group, names in zip(problem.groups, on_cpu)
        )
        key = shares, problem.machine.host_bytes
        if key not in self._found:
            limits = OIlpLimits(options=solution.options, cpu_fractions=shares, relaxed=True, reach=reach)
            self._found[key] = o_ilp(problem, settings, solver=solver, limits=limits).solution
        return self._found[key]


def round_o_ilp(
    problem: OffloadProblem,
    solution: OIlpSolution,
    settings: SolverSettings,
    *,
    reach: int | None = None,
    smoothed: bool = False,
    barred: frozenset[str] = frozenset(),
    solver: MilpSolver = "highs",
    refits: Refits | None = None,
) -> RoundedPlan:
    """Round a fractional solution to whole tensors.

    Args:
        problem: the problem that was solved, for the batch that is to run.
        solution: the fractional solution.
        settings: limits for solving it again with fewer choices (a linear program).
        reach: reach in the limits that `solution` was found with.
        smoothed: afterwards shift single transfers while that makes the iteration faster, within the device budget. It
            leaves less room for those who refine the plan row by row. Without it each step takes at most the memory
            that the fractions took.
        barred: tensors that the CPU does not update.
        solver: "highs" or "cbc".
        refits: what other roundings of the same solution, with the same settings and reach, have solved again.
    """
    refits = refits if refits is not None else Refits()
    on_cpu = _select_for_cpu(problem, solution, barred, carry=True)
    room_bytes = problem.machine.host_bytes
    fitted = refits.solution(problem, solution, on_cpu, settings, reach, solver)
    if fitted is None:
        on_cpu = _select_for_cpu(problem, solution, barred, carry=False)
        fitted = refits.solution(problem, solution, on_cpu, settings, reach, solver) or solution
    while True:
        items = _items(problem, fitted.groups, on_cpu)
        for item in items:
            item.whole_transfers(problem.steps)
        loads = Loads.of(problem, fitted.options, items, fitted.step_times_s)
        for item in sorted((i for i in items if i.on_cpu), key=_by_block):
            fill_cpu(loads, item)
        if smoothed:
            smooth(loads, items)
        plan = _plan(problem, fitted.options, items, loads)
        over = plan.host_bytes - problem.machine.host_bytes
        if over <= 0 or room_bytes <= 0:
            return plan
        # Whole tensors take more room in the lower tier than fractions did: leave that much in the next attempt.
        room_bytes -= over
        less = replace(problem, machine=replace(problem.machine, host_bytes=room_bytes))
        again = refits.solution(less, solution, on_cpu, settings, reach, solver)
        if again is None:
            return plan
        fitted = again


def _by_block(item: Item) -> int:
    return item.group.blocks[0]


def _select_for_cpu(
    problem: OffloadProblem, solution: OIlpSolution, barred: frozenset[str], *, carry: bool
) -> list[frozenset[str]]:
    """Choose the tensors of each group that are updated on the CPU, nearest to the fractions, carrying the rest on.

    They are never more than the CPU can do between last gradient and first use; or, without `carry`, at least the
    fraction.
    """
    found: list[frozenset[str]] = []
    rest = 0.0
    times, management_s = solution.step_times_s, problem.machine.management_s
    for group, fractions in zip(problem.groups, solution.groups):
        sizes = {t.name: t.nbytes for t in group.tensors if t.name not in barred}
        if not fractions.on_cpu or not problem.may_update_on_cpu(group):
            found.append(frozenset())
            continue
        wanted = fractions.on_cpu * group.nbytes
        if not carry:
            found.append(frozenset(select_at_least(sizes, int(wanted * (1 - TOLERANCE)))))
            continue
        window = problem.after(problem.last_gradient(group), problem.first_use(group))[:-1]
        time_s = sum(max(0.0, times[t] - management_s) for t in window)
        most = max(int(time_s / group.cpu_update_s * group.nbytes), 0) if group.cpu_update_s else group.nbytes
        target = wanted + rest
        below = select_at_most(sizes, max(0, min(round(target), most)))
        above = select_at_least(sizes, round(target))
        if sum(sizes[n] for n in above) > most:
            above = below
        nearest = min((below, above), key=lambda names: abs(sum(sizes[n] for n in names) - target))
        found.append(frozenset(nearest))
        rest = target - sum(sizes[n] for n in nearest)
    return found


def _items(problem: OffloadProblem, groups: Sequence[Fractions], on_cpu: Sequence[frozenset[str]]) -> list[Item]:
    found: list[Item] = []
    for group, fractions, names in zip(problem.groups, groups, on_cpu):
        weights = [Item.of(problem, group, t, states=False) for t in group.tensors]
        for item in weights:
            item.on_cpu = item.tensor.name in names
        here = [s + r + w for s, r, w in zip(fractions.stored, fractions.reloaded, fractions.waiting)]
        Algorithm8(problem, group, weights, here, fractions.stored, fractions.offloaded, fractions.gradients).run()
        moved = [i for i in weights if not i.on_cpu and i.tensor.state_bytes]
        states = [Item.of(problem, group, i.tensor, states=True) for i in moved]
        if states:
            here = [s + r for s, r in zip(fractions.states_stored, fractions.states_reloaded)]
            none = (0.0,) * problem.steps
            Algorithm8(problem, group, states, here, fractions.states_stored, fractions.states_offloaded, none).run()
        _placements(group, fractions.on_disk, weights, states)
        found += weights + states
    return found


def _placements(group: ParameterGroup, on_disk: float, weights: list[Item], states: list[Item]) -> None:
    """Choose the tensors placed on the disk: those in the host fit the portion that it has."""
    if not on_disk:
        return
    leaving = {i.tensor.name for i in (*weights, *states) if i.offload is not None or leaves(i)}
    sizes = {t.name: t.nbytes + t.state_bytes for t in group.tensors if t.name in leaving}
    host = (1 - on_disk) * (group.nbytes + group.state_bytes)
    names = set(select_at_least(sizes, int(sum(sizes.values()) - host * (1 + TOLERANCE))))
    for item in (*weights, *states):
        item.on_disk = item.tensor.name in names


def _plan(problem: OffloadProblem, options: tuple[int, ...], items: Sequence[Item], loads: Loads) -> RoundedPlan:
    steps = problem.steps
    transfers: list[dict[str, list[Any]]] = [{} for _ in range(steps)]
    resident: set[str] = set()
    states_resident: set[str] = set()
    host_bytes = sum(
        block.options[o].offload_bytes - block.options[o].disk_bytes for block, o in zip(problem.blocks, options)
    )
    disk_bytes = sum(block.options[o].disk_bytes for block, o in zip(problem.blocks, options))

    def note(t: int, what: str, item: Item, entry: Any) -> None:
        transfers[t].setdefault(what + ("_states" if item.states else ""), []).append(entry)

    def share_out(shares: dict[int, int], what: str, item: Item) -> None:
        for t, nbytes in shares.items():
            note(t, what, item, (item.tensor.name, nbytes))

    for item in items:
        placement = 0
        for gap in item.gaps:
            if gap.reload is None:
                continue
            note(
                gap.steps[0 if item.on_cpu and gap is item.gaps[0] else item.first_step_off(gap)],
                "delete",
                item,
                item.tensor.name,
            )
            share_out(gap.up, "reload", item)
            placement = item.nbytes
        share_out(item.down, "offload_gradients" if item.on_cpu else "offload", item)
        for t, seconds in sorted(item.updates.items()):
            share = seconds / item.tensor.cpu_update_s if item.tensor.cpu_update_s else 1.0
            transfers[t].setdefault("update", []).append((item.tensor.name, share))
        if item.on_cpu:
            placement += item.tensor.state_bytes
            host_bytes += item.nbytes
        if item.on_disk:
            disk_bytes += placement
        else:
            host_bytes += placement
        if _at_end(item, steps - 1):
            (states_resident if item.states else resident).add(item.tensor.name)
    return RoundedPlan(
        options=options,
        steps=tuple(RoundedTransfers(**{what: tuple(entries) for what, entries in m.items()}) for m in transfers),
        resident=frozenset(resident),
        states_resident=frozenset(states_resident),
        on_cpu=frozenset(i.tensor.name for i in items if i.on_cpu),
        on_disk=frozenset(i.tensor.name for i in items if i.on_disk),
        memory_bytes=tuple(loads.memory),
        step_times_s=tuple(map(loads.time_s, range(steps))),
        objective_s=loads.total_s(),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _at_end(item: Item, t: int) -> bool:
    """Say whether an item is on the device at the end of step t, before the drops of the next."""
    for gap in item.gaps:
        if gap.reload is not None and t in gap.steps:
            k = gap.steps.index(t)
            dropped = 0 if item.on_cpu and gap is item.gaps[0] else item.first_step_off(gap)
            return k < dropped or k >= gap.reload
    return True
