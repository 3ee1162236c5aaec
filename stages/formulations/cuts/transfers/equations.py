"""Writes the equations of memory where values may leave the device; `model` has the symbols, `rates` the links."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stowage.stages.formulations.cuts import equations as plain
from stowage.stages.formulations.cuts.transfers import rates
from stowage.stages.solver.equations import Constraints
from stowage.stages.solver.milp import pulp

if TYPE_CHECKING:
    from stowage.stages.formulations.cuts.transfers.model import TransferModel


def everything_runs(m: TransferModel) -> Constraints:
    """Run every node, or have the CPU run it: Σ_i run[n, i] + cpu[n] ≥ 1, and = 1 for nodes that run once."""
    for node, (earliest, latest) in enumerate(m.domain.first):
        on_cpu = m.cpu.get(node)
        if earliest == latest and on_cpu is None:
            continue
        total = pulp.lpSum(m.runs(node, i) for i in range(earliest, latest + 1)) + (0 if on_cpu is None else on_cpu)
        yield f"{node}", total == 1 if node in m.step.once else total >= 1


def stays(m: TransferModel) -> Constraints:
    """Leave behind what must remain, on the device or below: kept[s, N] + … + sent[s, N + 1] ≥ 1."""
    last = len(m.cuts)
    for value in sorted(m.step.stays):
        there = m.keeps(value, last) + m.makes(value, last) + m.sent.get((value, last + 1), 0)
        if not plain.certain(there):
            yield f"{value}", there >= 1


def reads_since(m: TransferModel) -> Constraints:
    """Let what runs after T_j find what it reads: since[n, j] ≤ kept[s, j] + since[maker(s), j] + Σ_(i ≥ j) up[s, i].

    What comes back was below by then: since[n, j] ≤ kept[s, j] + since[maker(s), j] + sent[s, j]. Both strengthen the
    relaxation, as the first does without a lower tier.
    """
    for cut in range(1, len(m.cuts) + 1):
        for node in range(len(m.step.nodes)):
            runs = m.runs_since(node, cut)
            if isinstance(runs, int) and not runs:
                continue
            for value in m.step.reads[node]:
                maker = m.step.maker.get(value)
                there = m.keeps(value, cut) + (0 if maker is None else m.runs_since(maker, cut))
                ups = pulp.lpSum(m.up[value, i] for i in m.intervals if i >= cut and (value, i) in m.up)
                if not plain.certain(there):
                    yield f"{node}_{cut}_{value}", there + ups >= runs
                    if maker is not None:
                        yield f"{node}_{cut}_{value}_sent", there + m.sent.get((value, cut), 0) >= runs


def lasting_reads_since(m: TransferModel) -> Constraints:
    """Let what runs after T_j find what lasts: since[n, j] ≤ there[p, j] + Σ_(i ≥ j) up[p, i], until n runs no more."""
    for cut in m.intervals:
        for node, touched in enumerate(m.below.touches):
            runs = m.runs_since(node, cut)
            if isinstance(runs, int) and not runs:
                continue
            latest = max(i for i in m.intervals if i >= cut and not _never(m.runs(node, i)))
            for storage in m.lasting.intersection(touched):
                ups = pulp.lpSum(m.up[storage, i] for i in range(cut, latest + 1) if (storage, i) in m.up)
                there = m.is_there(storage, cut)
                if not plain.certain(there):
                    yield f"{node}_{cut}_{storage}", there + ups >= runs


def lasting_reads(m: TransferModel) -> Constraints:
    """Run a node only beside what it touches of what lasts: run[n, i] ≤ there[p, i] + up[p, i]."""
    for storage, interval in sorted(m.needed):
        there = m.is_there(storage, interval) + m.up.get((storage, interval), 0)
        if not plain.certain(there):
            yield f"{storage}_{interval}", there >= 1
    for node, interval in sorted(m.domain.free_runs):
        for storage in m.below.touches[node]:
            if storage not in m.lasting or (storage, interval) in m.needed:
                continue
            there = m.is_there(storage, interval) + m.up.get((storage, interval), 0)
            if not plain.certain(there):
                yield f"{node}_{interval}_{storage}", there >= m.runs(node, interval)


def lasting_keeps(m: TransferModel) -> Constraints:
    """Have on the device only what was there or has been reloaded: there[p, j] ≤ there[p, j − 1] + up[p, j − 1].

    After the last interval comes the first of the next step: there[p, 0] ≤ there[p, N] + up[p, N].
    """
    for storage in sorted(m.lasting):
        for cut in range(1, len(m.cuts) + 2):
            there = m.is_there(storage, cut - 1) + m.up.get((storage, cut - 1), 0)
            if not plain.certain(there):
                yield f"{storage}_{cut}", there >= m.is_there(storage, cut)


def sent_before(m: TransferModel) -> Constraints:
    """Bring back only what is below: up[s, i] ≤ sent[s, i]; what is sent stays sent."""
    for (value, interval), variable in m.up.items():
        if value not in m.lasting and value not in m.step.waiting:
            yield f"{value}_{interval}", variable <= m.sent.get((value, interval), 0)
    for (value, cut), variable in m.sent.items():
        if (value, cut - 1) in m.sent:
            yield f"{value}_{cut}_more", variable >= m.sent[value, cut - 1]


def changed(m: TransferModel) -> Constraints:
    """Copy below what the device changes and does not keep: down[p] ≥ gone[p, j] ≥ 1 − there[p, j] − Σ_u cpu[u].

    The sum is over the nodes that change p, if the CPU can do all of them; else there is none.
    """
    for (storage, cut), variable in m.gone_if.items():
        on_cpu = pulp.lpSum(m.cpu[u] for u in m.changers[storage])
        yield f"{storage}_{cut}_gone", variable >= 1 - m.is_there(storage, cut) - on_cpu
    for storage, variable in m.down.items():
        for cut in m.intervals:
            if (storage, cut) in m.there:
                yield f"{storage}_{cut}", variable >= m.gone(storage, cut)


def needed_by_update(m: TransferModel) -> Constraints:
    """Bring up what an update alone reads: needed[p] ≥ 1 − there[p, e] − cpu[u], where e is the first interval of u."""
    for storage, (variable, (first, _)) in m.needed_by_update.items():
        (update,) = m.changers[storage]
        yield f"{storage}", variable >= 1 - m.is_there(storage, first) - m.cpu[update]


def updated_below(m: TransferModel) -> Constraints:
    """Have the CPU update what is below: its gradient goes down, sent[s, N + 1] ≥ cpu[u], and its weight comes up.

    For every weight p that u changes and that something on the device reads for certain, reloads[p] ≥ cpu[u], and
    reloads[p] ≥ Σ_i up[p, i]: the CPU updates only what is not on the device.
    """
    last = len(m.cuts)
    for node, on_cpu in m.cpu.items():
        for value in m.step.reads[node]:
            if (value, last + 1) in m.sent:
                yield f"{node}_{value}_down", m.sent[value, last + 1] >= on_cpu
        for storage in m.reloads.keys() & set(m.below.changes[node]):
            yield f"{node}_{storage}_up", m.reloads[storage] >= on_cpu
    for storage, variable in m.reloads.items():
        ups = [m.up[storage, i] for i in m.intervals if (storage, i) in m.up]
        yield f"{storage}_ups", variable >= pulp.lpSum(ups)


def memory(m: TransferModel) -> Constraints:
    """Keep within the budget at each cut: Σ_p bytes there[p, j] + Σ_s bytes kept[s, j] + workspace − taken ≤ budget.

    At T_0, between two steps, what lasts and gradients that wait are there.
    """
    nbytes = m.step.nbytes
    for j in m.intervals:
        room: float = m.budget_bytes
        if j:
            cut = m.cuts[j - 1]
            room -= m.step.nodes[cut].workspace_bytes - m.step.taken_bytes(cut)
            room -= sum(nbytes[s] for s, k in m.domain.sure_keeps if k == j)
        room -= sum(nbytes[p] for p in m.lasting if (p, j) not in m.there)
        terms: list[Any] = [m.moved(nbytes[s]) * v for (s, k), v in m.kept.items() if k == j]
        terms += [m.moved(nbytes[p]) * m.there[p, j] for p in sorted(m.lasting) if (p, j) in m.there]
        if not j:
            terms += [m.moved(nbytes[s]) * v for s, v in m.start.items()]
        yield f"{j}", pulp.lpSum(terms) <= room / m.byte_unit


EQUATIONS: dict[str, Callable[[TransferModel], Constraints]] = {
    "everything_runs": everything_runs,
    "reads": plain.reads,
    "keeps": plain.keeps,
    "stays": stays,
    "since": plain.since,
    "reads_since": reads_since,
    "lasting_reads": lasting_reads,
    "lasting_reads_since": lasting_reads_since,
    "lasting_keeps": lasting_keeps,
    "sent_before": sent_before,
    "changed": changed,
    "needed_by_update": needed_by_update,
    "updated_below": updated_below,
    "memory": memory,
    "computing": rates.computing,
    "lanes": rates.lanes,
    "cpu_time": rates.cpu_time,
    "between": rates.between,
    "period": rates.period,
}
"""The function that writes each equation; a constraint's name is `reads_…` and so on."""


def _never(run: object) -> bool:
    """Return whether run[n, i] is 0 for certain."""
    return isinstance(run, int) and not run
