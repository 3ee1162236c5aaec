"""Writes the equations of the cut formulation, each beside its constraint; `model` has the symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stowage.stages.formulations.cuts.beside import touched_bytes
from stowage.stages.solver.equations import Constraints
from stowage.stages.solver.milp import pulp

if TYPE_CHECKING:
    from stowage.stages.formulations.cuts.model import CutModel


def everything_runs(m: CutModel) -> Constraints:
    """Run every node by the last cut that needs it: Σ_i run[n, i] ≥ 1, and = 1 for nodes that run once.

    Of a family any node will do: Σ_i Σ_(n in F) run[n, i] ≥ 1.
    """
    for node, (earliest, latest) in enumerate(m.domain.first):
        if earliest == latest or node in m.step.optional:
            continue
        total = pulp.lpSum(m.runs(node, i) for i in range(earliest, latest + 1))
        yield f"{node}", total == 1 if node in m.step.once else total >= 1
    for number, (family, (earliest, latest)) in enumerate(zip(m.step.families, m.domain.families, strict=True)):
        total = pulp.lpSum(m.runs(n, i) for n in sorted(family) for i in range(earliest, latest + 1))
        yield f"family_{number}", total == 1 if family <= m.step.once else total >= 1


def reads(m: CutModel) -> Constraints:
    """Run a node only beside what it reads: run[n, i] ≤ kept[s, i] + run[maker(s), i] for every s that n reads."""
    for node, interval in sorted(m.domain.free_runs | m.domain.sure_runs):
        for value in m.step.reads[node]:
            there = sum(m.keeps(s, interval) + m.makes(s, interval) for s in m.step.serving(node, value))
            if not certain(there):
                yield f"{node}_{interval}_{value}", there >= m.runs(node, interval)


def in_order(m: CutModel) -> Constraints:
    """Change what lasts only after all that uses it as it was: run[n, i] ≤ Σ_(k ≤ i) run[n', k], where n is after n'.

    What uses it as it was does not run again afterwards. Where n runs once: run[n', i] + Σ_(k < i) run[n, k] ≤ 1.
    """
    for node, earlier in m.step.after.items():
        first, last = m.domain.first[node]
        for before in earlier:
            if before in m.domain.optional:
                continue
            for interval in range(first, min(last + 1, m.domain.first[before][1])):
                ran = sum(m.runs(before, k) for k in range(interval + 1))
                if not certain(ran):
                    yield f"{node}_{before}_{interval}", ran >= m.runs(node, interval)
            if before in m.step.once or node not in m.step.once:
                continue
            for interval in range(first + 1, len(m.cuts) + 1):
                again = m.runs(before, interval)
                changed = sum(m.runs(node, k) for k in range(interval))
                if not isinstance(again, int) and not (isinstance(changed, int) and not changed):
                    yield f"{node}_{before}_{interval}_again", again + changed <= 1


def reads_at_cuts(m: CutModel) -> Constraints:
    """Have what a cut reads in memory at it, or what serves instead: Σ kept[s, j] ≥ 1 over what serves."""
    for j, cut in enumerate(m.cuts, start=1):
        for value in m.step.reads[cut]:
            there = sum(m.keeps(s, j) for s in m.step.serving(cut, value))
            if not certain(there):
                yield f"{j}_{value}", there >= 1


def keeps(m: CutModel) -> Constraints:
    """Keep only what was kept or has been made: kept[s, j] ≤ kept[s, j − 1] + run[maker(s), j − 1]."""
    for value, cut in sorted(m.domain.free_keeps | m.domain.sure_keeps):
        there = m.keeps(value, cut - 1) + m.makes(value, cut - 1)
        if not certain(there):
            yield f"{value}_{cut}", there >= m.keeps(value, cut)


def stays(m: CutModel) -> Constraints:
    """Leave behind what must remain, from any cut on: kept[s, j] + since[maker(s), j] ≥ 1.

    For integers that of the last cut, which is kept[s, N] + run[maker(s), N] ≥ 1, says it all. In the relaxation what
    makes s would run by halves in two intervals after a cut without the others, and more cuts bound less than one.
    """
    for cut in range(1, len(m.cuts) + 1):
        for value in sorted(m.step.stays):
            there = m.keeps(value, cut) + m.made_since(value, cut)
            if not certain(there):
                yield f"{value}_{cut}", there >= 1


def since(m: CutModel) -> Constraints:
    """Say what runs after a cut at all: run[n, i] ≤ since[n, j] ≤ Σ_(k ≥ j) run[n, k] for every i ≥ j."""
    for (node, cut), variable in m.since.items():
        runs = [m.run[node, i] for i in m.free_after(node, cut)]
        yield f"{node}_{cut}", variable <= pulp.lpSum(runs)
        for k, run in enumerate(runs):
            yield f"{node}_{cut}_{k}", variable >= run


def reads_since(m: CutModel) -> Constraints:
    """Let what runs after T_j find what it reads: since[n, j] ≤ kept[s, j] + since[maker(s), j].

    It follows from `reads` and `keeps` for integers. Without it the relaxation runs a half of a node in each of two
    intervals, and has a half of what it reads; with it more cuts never bound less than one of them.
    """
    for cut in range(1, len(m.cuts)):
        for node in range(len(m.step.nodes)):
            runs = m.runs_since(node, cut)
            if isinstance(runs, int) and not runs:
                continue
            for value in m.step.reads[node]:
                served = m.step.serving(node, value)
                there = sum(m.keeps(s, cut) for s in served)
                there += sum(m.runs_since(n, cut) for s in served for n in m.step.makers.get(s, ()))
                if not certain(there):
                    yield f"{node}_{cut}_{value}", there >= runs


def memory(m: CutModel) -> Constraints:
    """Keep within the budget at each cut: base + Σ_s bytes(s) kept[s, j] + workspace(g_j) − taken(g_j) ≤ budget.

    taken(g_j) is the most that a sum may save by being written over a summand that dies there. Where only a part of the
    step trains, `memory_under_masks` counts instead.
    """
    if m.masks is not None:
        return
    for j, cut in enumerate(m.cuts, start=1):
        room = m.budget_bytes - m.step.base_bytes - m.step.nodes[cut].workspace_bytes + m.step.taken_bytes(cut)
        room -= sum(m.step.nbytes[s] for s, k in m.domain.sure_keeps if k == j)
        terms = [m.step.nbytes[s] / m.byte_unit * v for (s, k), v in m.kept.items() if k == j]
        yield f"{j}", pulp.lpSum(terms) <= room / m.byte_unit


def holding(m: CutModel) -> Constraints:
    """Say what is held under a mask: held[m, s, j] ≥ kept[s, j] − since[maker(s), j]."""
    for number, held in enumerate(m.held):
        for (value, cut), variable in held.items():
            yield f"{number}_{value}_{cut}", variable >= m.keeps(value, cut) - m.made_since(value, cut)


def late_runs(m: CutModel) -> Constraints:
    """Say whose run under every mask is late: late[n, j] ≤ since[n, j] and ≤ Σ late[n', j] over what reads it then."""
    for (node, cut), readers in m.masks.late.items() if m.masks is not None else ():
        yield f"{node}_{cut}", m.late[node, cut] <= m.runs_since(node, cut)
        if readers:
            found = [m.late[n, cut] for n in sorted(readers) if (n, cut) in m.late]
            yield f"{node}_{cut}_read", m.late[node, cut] <= pulp.lpSum(found)


def more_for_masks(m: CutModel) -> Constraints:
    """Count what runs again for what reads a value: more[n] ≥ share (kept[s, j] − held[m, s, j] − late[n, j]).

    What is kept and not held under the mask is made again for all that reads it under the mask.
    """
    for number, (mask, held) in enumerate(zip(m.masks.masks if m.masks is not None else (), m.held)):
        for (value, cut), share in mask.counted.items():
            if share:
                node = m.step.maker[value]
                rest = m.keeps(value, cut) - held[value, cut] - m.late.get((node, cut), 0)
                yield f"{number}_{value}_{cut}", m.more[node] >= share * rest


def more_for_all(m: CutModel) -> Constraints:
    """Count the same for what is not kept at all: more[n] ≥ share (1 − kept[s, j] − late[n, j])."""
    for (value, cut), share in m.masks.missed.items() if m.masks is not None else ():
        node = m.step.maker[value]
        yield f"{value}_{cut}", m.more[node] >= share * (1 - m.keeps(value, cut) - m.late.get((node, cut), 0))


def more_runs(m: CutModel) -> Constraints:
    """Count every run beside the first with its least share: more[n] ≥ share(n) (Σ_i run[n, i] − 1)."""
    for node, more in m.more.items():
        runs = sum(m.runs(node, i) for i in m.intervals)
        share = m.step.nodes[node].time_s / m.rerun_s(node) if m.rerun_s(node) else 0.0
        yield f"{node}", more >= share * (runs - 1)


def memory_under_masks(m: CutModel) -> Constraints:
    """Keep within the budget at each cut under each mask: base(m) + Σ_s bytes(s) held[m, s, j] + beside ≤ budget.

    Beside what is held there is what g_j reads and its workspace, if g_j has one run: (1 − since[g_j, j]) of it.
    """
    for number, (mask, held) in enumerate(zip(m.masks.masks if m.masks is not None else (), m.held)):
        for cut in range(1, len(m.cuts) + 1):
            terms = [m.step.nbytes[s] / m.byte_unit * variable for (s, j), variable in held.items() if j == cut]
            own = mask.beside.get(cut, 0) / m.byte_unit * (1 - m.runs_since(m.cuts[cut - 1], cut))
            yield f"{number}_{cut}", pulp.lpSum(terms) + own <= (m.budget_bytes - mask.base_bytes) / m.byte_unit


def lasting(m: CutModel) -> Constraints:
    """Say what lasts until the next cut: lasts[s, i] ≥ kept[s, i + 1] − again[maker(s), i], or − run[maker(s), i]."""
    done: set[tuple[int, int]] = set()
    for beside in (b for row in m.beside.values() for b in row):
        if beside.until is not None and beside.until not in done:
            done.add(beside.until)
            value, cut = beside.until
            yield f"{value}_{cut - 1}", m.lasts[value, cut - 1] >= m.kept[beside.until] - m.remade(beside)


def memory_beside(m: CutModel) -> Constraints:
    """Keep within the budget while a heavy node h of interval i has its first run.

    base + bytes of what it touches + Σ bytes(s) (1 − again[maker(s), i]) over what is made before h and read after it,
    or (1 − run[maker(s), i]) where it may be from before T_i, + Σ bytes(s) lasts[s, i] over what may be kept at the
    next cut ≤ budget.
    """
    for node, row in m.beside.items():
        room = m.budget_bytes - m.step.base_bytes - touched_bytes(m.step, node)
        terms: list[Any] = []
        for beside in row:
            nbytes = m.step.nbytes[beside.value]
            if beside.until is not None:
                terms.append(nbytes / m.byte_unit * m.lasts[beside.value, beside.until[1] - 1])
            else:
                remade = m.remade(beside)
                if not isinstance(remade, int):
                    terms.append(-nbytes / m.byte_unit * remade)
                    remade = 0
                room -= nbytes * (1 - remade)
        yield f"{node}", pulp.lpSum(terms) <= room / m.byte_unit


def charges(m: CutModel) -> Constraints:
    """Keep what charges cost within what is allowed: used[c] ≥ run[n, i] for every n of c, and Σ share(c) used[c] ≤ 1.

    A charge that is more than everything by itself counts as 2: it is not taken.
    """
    for number, (charge, used) in enumerate(zip(m.step.charges, m.used, strict=True)):
        for (node, interval), run in m.run.items():
            if node in charge.nodes:
                yield f"{number}_{node}_{interval}", used >= run
    if m.used:
        yield "all", pulp.lpSum(min(c.share, 2.0) * used for c, used in zip(m.step.charges, m.used, strict=True)) <= 1


def lanes(m: CutModel) -> Constraints:
    """Let collectives run beside computing: total ≥ Σ time(n) over what computes, and likewise over collectives.

    A collective may also run in the order of what computes: it needs the network of the ranks there too.
    """
    if m.total is None:
        return
    together = m.time_of(n.node for n in m.step.nodes if n.collective)
    computing = m.time_of(n.node for n in m.step.nodes if not n.collective)
    yield "computing", m.total >= computing
    yield "collectives", m.total >= together


EQUATIONS: dict[str, Callable[[CutModel], Constraints]] = {
    "everything_runs": everything_runs,
    "reads": reads,
    "in_order": in_order,
    "reads_at_cuts": reads_at_cuts,
    "keeps": keeps,
    "stays": stays,
    "since": since,
    "reads_since": reads_since,
    "memory": memory,
    "holding": holding,
    "late_runs": late_runs,
    "more_for_masks": more_for_masks,
    "more_for_all": more_for_all,
    "more_runs": more_runs,
    "memory_under_masks": memory_under_masks,
    "lasting": lasting,
    "memory_beside": memory_beside,
    "charges": charges,
    "lanes": lanes,
}
"""The function that writes each equation; a constraint's name is `reads_…` and so on."""


def certain(there: object) -> bool:
    """Return whether a sum of variables and numbers is at least 1 whatever the variables are."""
    constant = there if isinstance(there, int) else getattr(there, "constant", 0)
    return isinstance(constant, (int, float)) and constant >= 1
