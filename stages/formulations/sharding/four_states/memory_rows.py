"""Memory as rows of whole numbers, and as rows that a solver can count with.

A moment's bytes are a constant and a sum over groups, each of which has one state: Σ_g v(g, σ_g) ≤ limit, where the
least of every group is taken out of both sides. Where all but one group together leave d of the limit whatever they
do, d bytes of that group never matter: they are taken from its states and from the limit, and nothing is allowed or
forbidden thereby. It leaves rows that hold under a condition ("if it is gathered again") with no more than they need.

Solvers count with tolerances, and what is small beside the limit is lost in them: an answer may exceed it by a
millionth, and one that fits may be cut off. So the rows of the program leave out what is smaller than `SLACK` of the
limit and allow that much more; every choice that fits has room in them. An answer that does not fit by the whole
numbers is cut off by a cover: of groups whose states do not fit together, one must take less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.sharding.memory import Key, Moment, State, states_of
from stowage.stages.formulations.sharding.problem import ShardingProblem

SLACK = 1e-5
"""Part of a limit that a row may be exceeded by, and below which bytes are left out; tenfold a solver's tolerances."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of the states of groups that must not exceed a limit together.

    Attributes:
        name: of the moment, for people.
        states: the bytes of every state, of each group for which they differ, 0 or more.
        limit: the most that they may add up to; below 0 where nothing fits.
    """

    name: str
    states: Mapping[int, Mapping[State, int]]
    limit: int

    @property
    def most(self) -> int:
        """Return the bytes of the largest states together."""
        return sum(max(of.values()) for of in self.states.values())

    def items(self) -> Iterator[tuple[Key, int]]:
        """Yield the states that take something, with their bytes."""
        for group, of in self.states.items():
            for state, nbytes in of.items():
                if nbytes:
                    yield (group, state), nbytes

    def cover(self, chosen: Sequence[State]) -> list[frozenset[Key]]:
        """Return sets of states of which one must not be taken; none where the states that are chosen fit.

        There is one set for each group of a smallest selection that does not fit: the states that take as much.
        """
        taken = {group: of[chosen[group]] for group, of in self.states.items()}
        excess = sum(taken.values()) - self.limit
        if excess <= 0:
            return []
        found = []
        for group, nbytes in sorted(taken.items(), key=lambda each: each[1]):
            if nbytes < excess:
                excess -= nbytes
            else:
                found.append(frozenset((group, s) for s, own in self.states[group].items() if own >= nbytes))
        return found


def row_of(moment: Moment, problem: ShardingProblem, budget: int) -> MemoryRow:
    """Return a moment as a row, as tight as it can be without other choices fitting."""
    limit = budget - moment.constant
    states: dict[int, dict[State, int]] = {}
    for i, group in enumerate(problem.groups):
        of = {s: moment.chosen.get((i, s), 0) for s in states_of(group)}
        least = min(of.values())
        limit -= least
        if max(of.values()) > least:
            states[i] = {s: nbytes - least for s, nbytes in of.items()}
    most = sum(max(of.values()) for of in states.values())
    for i, of in list(states.items()):
        own = max(of.values())
        never = min(limit - (most - own), own)
        if never > 0:
            states[i] = {s: max(0, nbytes - never) for s, nbytes in of.items()}
            limit, most = limit - never, most - never
    return MemoryRow(moment.name, {i: of for i, of in states.items() if max(of.values())}, limit)
