"""Bounds one way to compute the step where plans may offload, by cuts whose program has the links' rates."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from itertools import pairwise

from stowage.stages.formulations.cuts.choice import Choice
from stowage.stages.formulations.cuts.step_graph import StepGraph
from stowage.stages.formulations.cuts.transfers.below import Below
from stowage.stages.formulations.cuts.transfers.solve import solve_with_transfers
from stowage.stages.rewrite import Way
from stowage.stages.solve.cuts.way import CLOSE, SINGLE_CUTS
from stowage.stages.solve.offload.cpu_updates import UpdatesOnCpu
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solver.outcome import SolverSettings

BETTER = 1e-3
"""Relative improvement of the bound for which another cut is worth its time."""


class TransferWay:
    """Improves the bound of one way, solve by solve.

    Attributes:
        way: the trace and its nodes.
        name: the way's name.
        kind: the kind of bound.
        bound_s: no plan of the way has a shorter period.
        cuts: the cuts of that bound; none while it is the time of every node once.
        fastest_s: the time of the fastest plan that is known.
    """

    def __init__(
        self,
        way: Way,
        program: StepProgram,
        fastest_s: float,
        budget_bytes: int,
        tier: LowerTier,
    ) -> None:
        """Begin with what is known.

        Args:
            way: the trace and its nodes.
            program: its program.
            fastest_s: the time of the fastest plan of the way; infinite where none is known.
            budget_bytes: of the device.
            tier: the lower tier.
        """
        self.way = way
        self.name = way.name
        self.kind = "cuts with transfers"
        self._step = StepGraph.of(way.trace, way.nodes)
        updates = UpdatesOnCpu(program, tier)
        seconds = {n.node: updates.seconds(n) for n in way.nodes if n.phase == "update"}
        self._below = Below.of(way.trace, self._step, tier.link, seconds, disk=tier.disk is not None)
        self._budget_bytes = budget_bytes
        self._choice = Choice(self._step, {n.node for n in way.nodes if not n.collective})
        self.bound_s = self._below.once_s(self._step)
        self.cuts: tuple[int, ...] = ()
        self.fastest_s = fastest_s
        self._seconds_per_interval = 0.0

    def improve(self, deadline_s: float) -> Generator[None]:
        """Solve for one set of cuts after another, until there is nothing to improve or time is over.

        Args:
            deadline_s: on the clock of `time.monotonic`.
        """
        tried: dict[int, float] = {}
        places = dict.fromkeys(
            (*self._choice.end_of_forward(), *self._choice.hottest(peaks_of(self._step), SINGLE_CUTS))
        )
        for place in places:
            if self._close or not self._solve([place], deadline_s, tried):
                return
            yield
        while self.cuts and not self._close:
            before_s, cuts = self.bound_s, self.cuts
            for place in sorted(tried, key=lambda n: -tried[n]):
                more = sorted({*cuts, place})
                if len(more) == len(cuts) or not self._chain(more):
                    continue
                if self._close or not self._solve(more, deadline_s, {}):
                    return
                yield
                if self.bound_s > before_s * (1 + BETTER):
                    break
            else:
                return

    @property
    def _close(self) -> bool:
        return self.fastest_s <= self.bound_s * (1 + CLOSE)

    def _chain(self, cuts: Sequence[int]) -> bool:
        return all(self._step.precedes(a, b) for a, b in pairwise(cuts))

    def _solve(self, cuts: Sequence[int], deadline_s: float, bounds: dict[int, float]) -> bool:
        """Solve the relaxation for some cuts, and return whether there was time for it, as the last solve took it."""
        began_s = time.monotonic()
        left_s = deadline_s - began_s
        if left_s <= 0 or left_s < self._seconds_per_interval * (len(cuts) + 1):
            return False
        answer = solve_with_transfers(self._step, cuts, self._budget_bytes, self._below, SolverSettings(left_s))
        self._seconds_per_interval = (time.monotonic() - began_s) / (len(cuts) + 1)
        bounds[cuts[0]] = answer.bound_s
        if answer.bound_s > self.bound_s:
            self.bound_s, self.cuts = answer.bound_s, answer.cuts
        return True


def peaks_of(step: StepGraph) -> dict[int, int]:
    """Return what each node needs of values and workspace where every node runs once, in order, and nothing leaves."""
    last = {s: max([step.maker.get(s, -1), *readers]) for s, readers in step.readers.items()}
    last |= dict.fromkeys(step.stays, len(step.nodes))
    live, found = set(step.waiting), {}
    for node in step.nodes:
        live.update(node.creates)
        found[node.node] = sum(step.nbytes[s] for s in live) + node.workspace_bytes
        live = {s for s in live if last[s] > node.node}
    return found
