"""RK-Rotor on an H-Graph (thesis 2.5, 3.2.2 "Combining"), for graphs whose forward part is nearly a sequence.

`as_chain.py` makes the chain; dynamic programming (`rk_rotor.py`) gives a sequence for every memory at once; the
sequence is read as a choice of `lazy.py`, whose executions determine its true memory. With the fastest option of every
cluster alone it is Rotor (Beaumont et al. 2020).

The table rounds up to slots and frees late, so plans for more nominal memory than a budget may fit it: they are found
by bisection over the levels of nominal memory, as their true peaks nearly always fall with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property

from stowage.stages.formulations.chain.rk_rotor import HEADROOM, ChainBlock, ChainStep, RkRotor
from stowage.stages.formulations.cluster.as_chain import HChain
from stowage.stages.formulations.cluster.lazy import HCandidate, HChoice, candidate_of
from stowage.stages.formulations.cluster.problem import HProblem

CROSSING = 0.45
"""Largest share of the bytes made in forward, read beyond the next node, for which RK-Rotor is applied.

Such values are kept without being planned for. In experiments, plans grew out of RK-Rotor's that were faster than the
greedy rule's up to a share of 0.41, and none from 0.47 on.
"""

SLOTS = 300
AROUND = 3
"""Levels tried on each side of where bisection ends, because true peaks do not fall strictly."""

FINER = 3
"""Number of tables for the smallest peak, each in finer slots than the one before."""


def is_sequence(chain: HChain) -> bool:
    """Say whether RK-Rotor applies, by `CROSSING`."""
    data = chain.data
    made = sum(data.nbytes[d] for d, makers in enumerate(data.contributors) if makers[0] < data.graph.loss)
    return chain.crossing_bytes <= CROSSING * made


class HRotor:
    """Finds RK-Rotor's plans for one H-Graph; one table gives those for many budgets."""

    def __init__(self, chain: HChain, most_bytes: int, slots: int = SLOTS) -> None:
        """Prepare tables for an H-Graph.

        Args:
            chain: the graph.
            most_bytes: keep-all's peak.
            slots: number of slots of a table.
        """
        self._chain, self._most_bytes, self._slots = chain, max(1, most_bytes), slots
        self._tables: dict[int, tuple[RkRotor, list[int]]] = {}
        self._found: dict[tuple[int, int], HCandidate] = {}

    @staticmethod
    def where_it_applies(data: HProblem, most_bytes: int) -> HRotor | None:
        """Make it, or None where forward is no sequence."""
        chain = HChain.of(data)
        return HRotor(chain, most_bytes) if chain is not None and is_sequence(chain) else None

    def near(self, peak_bytes: int, save_bytes: int) -> list[HCandidate]:
        """Return the fastest plan within both budgets, then a faster one that takes little more, if there are such."""
        # Make tables for budgets up to keep-all's peak, a half of it, a quarter, ...
        halvings = max(0, (self._most_bytes // max(1, peak_bytes)).bit_length() - 1)
        nominal_bytes = int(HEADROOM * self._most_bytes) >> halvings
        levels = self._table(nominal_bytes)[1]

        def fits(level: int) -> bool:
            return self._candidate(nominal_bytes, levels[level]).cost.within(peak_bytes, save_bytes)

        if not levels:
            return []
        first = bisect_left(range(len(levels)), True, key=fits)
        looked_at = range(max(0, first - AROUND), min(len(levels), first + AROUND))
        plans = [self._candidate(nominal_bytes, levels[level]) for level in looked_at]
        fitting = [c for c in plans if c.cost.within(peak_bytes, save_bytes)]
        best = min(fitting, key=lambda c: (c.cost.time_s, c.cost.peak_bytes), default=None)
        faster = [c for c in plans if c not in fitting and (best is None or c.cost.time_s < best.cost.time_s)]
        above = min(faster, key=lambda c: (c.cost.peak_bytes, c.cost.time_s), default=None)
        return [c for c in (best, above) if c is not None]

    @cached_property
    def smallest(self) -> list[HCandidate]:
        """Return RK-Rotor's tightest plans, through ever finer slots."""
        nominal_bytes, found = int(HEADROOM * self._most_bytes), list[HCandidate]()
        for _ in range(FINER):
            table, levels = self._table(nominal_bytes)
            if not levels:
                break
            found += [self._candidate(nominal_bytes, level) for level in levels[-AROUND:]]
            nominal_bytes = (levels[-1] + 1) * table.slot_bytes
        return found

    def _table(self, nominal_bytes: int) -> tuple[RkRotor, list[int]]:
        """Return the table, and its numbers of slots that differ in time, most memory first."""
        if nominal_bytes not in self._tables:
            table = RkRotor(self._blocks, self._slots, max(1, -(-nominal_bytes // self._slots)))
            least = table.smallest_slots()
            times = [table.time_s(m) for m in range(self._slots + 1)]
            steps = [] if least is None else range(self._slots, least - 1, -1)
            self._tables[nominal_bytes] = table, [m for m in steps if m == least or times[m - 1] != times[m]]
        return self._tables[nominal_bytes]

    @cached_property
    def _blocks(self) -> list[ChainBlock]:
        return self._chain.blocks()

    def _candidate(self, nominal_bytes: int, level: int) -> HCandidate:
        if (nominal_bytes, level) not in self._found:
            choice = choice_of(self._chain, self._table(nominal_bytes)[0].sequence(level))
            self._found[nominal_bytes, level] = candidate_of(self._chain.data, choice)
        return self._found[nominal_bytes, level]


def choice_of(chain: HChain, steps: Iterable[ChainStep]) -> HChoice:
    """Convert a sequence to options, dropped phantoms and cuts.

    What runs again does so right before the backward it is for, and is not kept until then.
    """
    data = chain.data
    options, dropped, cuts = [0] * len(data.graph.clusters), set[int](), set[tuple[int, int]]()
    ran, waiting = set[int](), data.graph.loss
    for step in steps:
        if step.kind == "backward":
            waiting = step.block
        if step.kind not in {"fast", "forward"}:
            continue
        j = data.forward_of.get(step.block)
        if j is not None and step.kind == "forward":
            options[j] = step.option
        if step.block in ran and chain.runs_again(step.block):
            cuts.add((step.block, chain.begins[waiting - 1] - 1))
        elif j is not None and step.kind == "fast":
            dropped.add(j)
        ran.add(step.block)
    return HChoice(tuple(options), frozenset(dropped), frozenset(cuts))
