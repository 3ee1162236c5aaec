"""Says what is in a device's memory at every moment of a step under FSDP2, as sums over the states of the groups.

It follows what FSDP2 allocates and frees, in its order. For a group of N elements, N′ of them trained, of which a rank
has the n-th part:

- Before a group is used, a buffer of c N bytes takes what arrives from all ranks; of a group on the host its shard is
  copied to the device meanwhile. Then c N bytes of weights are copied out of it. In forward the buffer stays until the
  next group's weights are copied out; in backward it is freed at once.
- Where weights are cast for a gather, a rank's shard of c N / n bytes is there meanwhile; one rank alone casts one
  parameter after the other.
- After a group's backward its weights are freed. Its gradients, c N′ bytes, are copied into a buffer of r N′ bytes to
  be reduced, which stays until the next group is reduced; what a rank keeps of them, s N′ / n bytes, stays until the
  update. Where it is cast, r N′ / n bytes are there beside it.
- The last of its gradients, c N″ bytes, is freed after the reduction, all others before it.
- A group that reads nothing which needs a gradient keeps its weights and gradients until the root has been reduced; one
  that returns nothing which needs a gradient is not gathered in backward.
- Activations that forward has saved are freed as backward uses them.
- Where a group is gathered, and where its gradients are reduced, there is more than what has been saved: what has just
  been computed, gradients of what the group has returned, gradients of the root that wait.
- At the end the optimizer makes temporaries for one parameter after the other, where their size is known.
- The root is gathered first and reduced last; its activations are at the turn from forward to backward.

A moment is a row of the exact choice: a constant, and bytes for each group and state. What is gathered again is added
for the states that reshard alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import ParameterGroup


class State(NamedTuple):
    """One of the four states of a group."""

    on_host: bool
    keep: bool


STATES = (State(False, False), State(False, True), State(True, False), State(True, True))

Key = tuple[int, State]
"""Position of a group, and a state."""


@dataclass(frozen=True)
class Moment:
    """A moment at which memory may bind.

    Attributes:
        name: for people.
        constant: bytes whatever is chosen.
        chosen: bytes by position of a group and state, where that is not 0.
    """

    name: str
    constant: int
    chosen: Mapping[Key, int]

    def contains(self, other: Moment) -> bool:
        """Return whether it has as many bytes as another moment, whatever is chosen."""
        keys = {**self.chosen, **other.chosen}
        return self.constant >= other.constant and all(self.chosen.get(k, 0) >= other.chosen.get(k, 0) for k in keys)


def states_of(group: ParameterGroup) -> tuple[State, ...]:
    """List the states that a group may have: the root is always kept."""
    return tuple(s for s in STATES if s.keep or not group.is_root)


def moments(problem: ShardingProblem) -> tuple[Moment, ...]:
    """Return every moment at which memory may bind; one that another moment of the same use contains is left out."""
    replay = _Replay(problem)
    uses = [replay.taken(), *(replay.taken() for _ in chain(replay.forward(), replay.backward()))]
    return tuple(moment for use in uses for moment in _largest(use))


def _largest(found: Sequence[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for moment in found:
        if not any(other.contains(moment) for other in kept):
            kept = [other for other in kept if not moment.contains(other)] + [moment]
    return kept


class _Replay:
    """Adds up what is in memory, and notes moments."""

    def __init__(self, problem: ShardingProblem) -> None:
        self._problem, self._groups, self._ranks = problem, problem.groups, problem.machine.ranks
        self._order = [i for i, g in enumerate(self._groups) if not g.is_root]
        self._root = next((i for i, g in enumerate(self._groups) if g.is_root), None)
        self._constant = problem.fixed_bytes
        self._chosen: dict[Key, int] = {}
        self._found: list[Moment] = []
        self._arriving: set[int] = set()
        self._whole: set[int] = set()
        self._lingering: int | None = None
        self._reducing = 0
        self._again = False
        self._count = 0
        for i, g in enumerate(self._groups):
            nbytes = self._part(g.elements * g.stored_bytes) + self._part(g.trainable * g.state_bytes)
            self._add_on_device(i, nbytes + (self._shard_of_gradients(g) if self._accumulates else 0))
        self._much = 2 * sum(
            g.elements * (g.stored_bytes + 4 * g.compute_bytes)
            + g.trainable * (g.state_bytes + g.stored_bytes + 4 * g.compute_bytes)
            + g.saved_bytes
            + g.forward_peak_bytes
            + g.backward_peak_bytes
            + g.end_peak_bytes
            + abs(g.entering_bytes)
            + abs(g.incoming_bytes)
            + abs(g.leaving_bytes)
            + 4 * g.trainable * g.reduce_bytes
            + g.largest_cast * (g.stored_bytes + g.compute_bytes)
            + g.update_bytes
            for g in self._groups
        )
        self._note("between_steps")

    @property
    def _accumulates(self) -> bool:
        return self._problem.micro_batches > 1

    def taken(self) -> list[Moment]:
        """Return the moments noted since the last time."""
        found, self._found = self._found, []
        return found

    def forward(self) -> Iterator[int]:
        """Yield after each use in forward."""
        root, ahead = self._root, self._problem.ahead
        if root is not None:
            self._ask(root)
            self._copy_out(root)
            self._ask_all(self._order[:ahead])
            self._constant += self._groups[root].first_saved_bytes
        for place, i in enumerate(self._order):
            g = self._groups[i]
            self._constant += g.entering_bytes
            self._ask(i)
            self._copy_out(i)
            self._ask_all(self._order[place + 1 : place + 1 + ahead])
            self._constant -= g.entering_bytes
            self._note(f"forward_{i}", g.forward_peak_bytes)
            self._add(i, lambda state, g=g: 0 if state.keep else -gathered_bytes(g))  # type: ignore[misc]
            self._constant += g.saved_bytes
            yield i
        if root is not None:
            g = self._groups[root]
            self._note(f"forward_{root}", g.forward_peak_bytes - g.first_saved_bytes)
            self._constant += g.saved_bytes - g.first_saved_bytes
            yield root
        self._let_linger(None)

    def backward(self) -> Iterator[int]:
        """Yield after each use in backward."""
        self._again, self._whole, self._arriving = True, set(), set()
        root, ahead, order = self._root, self._problem.ahead, self._order[::-1]
        if root is not None:
            g = self._groups[root]
            self._ask_all(order[:ahead])
            self._constant -= g.saved_bytes - g.first_saved_bytes
            self._note(f"turn_{root}", g.backward_peak_bytes - g.first_saved_bytes)
        for place, i in enumerate(order):
            g = self._groups[i]
            self._constant += g.incoming_bytes
            if not g.idle_in_backward:
                same = [j for j in order[place:] if g.segment >= 0 and self._groups[j].segment == g.segment]
                for j in same or [i]:
                    self._ask(j)
                    self._copy_out(j)
                self._ask_all(order[place + 1 : place + 1 + ahead])
            self._constant -= g.incoming_bytes + g.saved_bytes
            both = g.backward_peak_bytes + gradient_bytes(g)
            self._note(f"backward_{i}", min(both, g.backward_with_gradients_bytes or both))
            if g.after_root:
                self._constant += gradient_bytes(g)
            else:
                self._constant += g.leaving_bytes
                self._reduce(i)
                self._constant -= g.leaving_bytes
            yield i
        if root is not None:
            g = self._groups[root]
            self._constant -= g.first_saved_bytes
            self._note(f"backward_{root}", max(gradient_bytes(g), g.end_peak_bytes))
            self._reduce(root)
            yield root
        late = [i for i in order if self._groups[i].after_root]
        for i in sorted(late, key=lambda i: self._groups[i].after_root):
            self._constant -= gradient_bytes(self._groups[i])
            self._reduce(i)
            if i in self._arriving:  # gathered ahead, though idle
                self._arriving.discard(i)
                self._add_gathered(i, -self._buffer(self._groups[i]))
            yield i
        updated = [i for i, g in enumerate(self._groups) if g.update_bytes]
        self._constant -= self._reducing
        for i in updated:
            temporary = self._part(self._groups[i].update_bytes)
            self._add_on_device(i, temporary)
            self._note(f"update_{i}")
            self._add_on_device(i, -temporary)
            yield i

    def _ask_all(self, groups: Sequence[int]) -> None:
        for i in groups:
            self._ask(i)

    def _ask(self, i: int) -> None:
        """Begin to gather a group; in backward, if it is not kept."""
        if i in self._whole or i in self._arriving:
            return
        g = self._groups[i]
        self._arriving.add(i)
        self._add_gathered(i, self._buffer(g))
        copies = self._buffer(g) if self._problem.copies else 0
        cast = self._part(gathered_bytes(g)) if g.largest_cast else 0

        def more(state: State) -> int:
            copied = self._part(g.elements * g.stored_bytes) if self._on_host(state) else 0
            if not cast:
                return max(copied, copies)
            # A shard is copied and cast before there is a buffer; one rank alone does so as it copies out.
            return max(copied + cast - self._buffer(g), cast + copies) if self._ranks > 1 else 0

        self._note(f"gather_{i}", 0, i, more)

    def _copy_out(self, i: int) -> None:
        """Wait until a group has arrived, and copy its weights out."""
        if i not in self._arriving:
            return
        self._arriving.discard(i)
        self._whole.add(i)
        g = self._groups[i]
        if not self._again:
            self._let_linger(i)
        self._add_gathered(i, gathered_bytes(g))
        alone = g.largest_cast if self._ranks == 1 else 0

        def casting(state: State) -> int:
            return alone * (g.compute_bytes + (g.stored_bytes if self._on_host(state) else 0))

        self._note(f"copy_out_{i}", 0, i, casting)
        if self._again:
            self._add_gathered(i, -self._buffer(g))

    def _let_linger(self, i: int | None) -> None:
        """Free the buffer that stayed until now, and let that of a group stay."""
        if self._lingering is not None:
            self._constant -= self._buffer(self._groups[self._lingering])
        self._lingering = i

    def _reduce(self, i: int) -> None:
        g = self._groups[i]
        if i in self._whole:
            self._constant -= gathered_bytes(g)
        else:  # not gathered in backward: whole only if it was kept, as the root always is
            self._add(i, lambda state: -gathered_bytes(g) if state.keep else 0)
        self._constant -= self._reducing
        self._reducing = reduced_bytes(g)
        self._constant += self._reducing
        if not self._reducing:
            return
        self._note(f"reduce_{i}", gradient_bytes(g))
        copied = self._reducing if self._problem.copies and self._ranks > 1 else 0
        last = g.last_trainable * g.compute_bytes if self._ranks > 1 else 0
        if g.casts_gradients:
            part = self._part(self._reducing)
            self._note(f"reduce_{i}", part + max(copied, self._shard_of_gradients(g)) + last)
        else:
            self._note(f"reduce_{i}", self._shard_of_gradients(g) + copied + last)
        if not self._accumulates:
            self._add_on_device(i, self._shard_of_gradients(g))

    def _buffer(self, g: ParameterGroup) -> int:
        return gathered_bytes(g) if self._ranks > 1 else 0

    def _part(self, nbytes: int) -> int:
        return -(-nbytes // self._ranks)

    def _shard_of_gradients(self, g: ParameterGroup) -> int:
        return self._part(g.trainable * g.stored_bytes)

    def _on_host(self, state: State) -> bool:
        return state.on_host and not self._problem.host_is_device

    def _add(self, i: int, nbytes: Callable[[State], int]) -> None:
        for state in states_of(self._groups[i]):
            self._chosen[i, state] = self._chosen.get((i, state), 0) + nbytes(state)

    def _add_on_device(self, i: int, nbytes: int) -> None:
        self._add(i, lambda state: 0 if self._on_host(state) else nbytes)

    def _add_gathered(self, i: int, nbytes: int) -> None:
        self._add(i, lambda state: 0 if self._again and state.keep else nbytes)

    def _note(
        self, name: str, extra: int = 0, gathered: int | None = None, more: Callable[[State], int] | None = None
    ) -> None:
        """Note a moment; one of gathering again does not come to pass where the group is kept, and does not bind."""
        chosen = dict(self._chosen)
        if gathered is not None and more is not None:
            for state in states_of(self._groups[gathered]):
                never = self._again and state.keep
                chosen[gathered, state] = chosen.get((gathered, state), 0) + (-self._much if never else more(state))
        found = {key: nbytes for key, nbytes in chosen.items() if nbytes}
        self._count += 1
        self._found.append(Moment(f"{name}_{self._count}", self._constant + extra, found))


def gathered_bytes(group: ParameterGroup) -> int:
    """Return the bytes of a group's gathered weights, c N."""
    return group.elements * group.compute_bytes


def gradient_bytes(group: ParameterGroup) -> int:
    """Return the bytes of a group's gradients before they are reduced, c N′."""
    return group.trainable * group.compute_bytes


def reduced_bytes(group: ParameterGroup) -> int:
    """Return the bytes of a group's gradients as they are reduced, r N′."""
    return group.trainable * group.reduced_bytes
