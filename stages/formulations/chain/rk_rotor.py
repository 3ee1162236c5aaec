"""RK-Rotor (thesis 2.5) chooses the option of each block of a chain, by dynamic programming over memory slots.

| symbol | meaning | unit |
|---|---|---|
| L | number of blocks, 0 first | |
| x_s | input of block s; kept by the caller of the sub-problem, never counted inside it | slots |
| F_s^o, B_s^o | forward and backward of block s with option o | s |
| F_s^0 | fast-forward: computes x_{s+1} and keeps nothing | s |
| x̄_s^o | kept between F_s^o and B_s^o, x_{s+1} included | slots |
| g_t | gradient of x_{t+1}, in memory while blocks s..t wait for it | bytes |
| G_t | parameter gradients of blocks > t that stay in memory | bytes |
| Opt(s, t, m) | least time to run blocks s..t forward and backward with m slots besides x_s | s |

Deviations from the thesis, each of which makes the plan cheaper or truer:

- The sub-problem s..t with t < L−1 starts when block t+1 has finished its backward: g_t and G_t are in memory from its
  start and are added to every forward's need (Rotor's m_∅ and m_all count |g_t| likewise). B_s runs when all blocks
  after s are done: G_s is added to its need. So gradients that stay are subtracted exactly, not as a constant.
- When block t < L−1 runs for the last time nobody needs x_{t+1} any more; its last-run options leave out what only
  x_{t+1} needed (a recomputed block stops early).
- Where that saves most of the sub-problems, memory is counted above G_t: then sub-problems over equal blocks are equal
  wherever they are, though gradients add up beside them (those of a scan's inputs, made step by step). The difference
  between two such counts is rounded up to slots.
- (2.21) lets i reach t: keeping x_t and running block t alone is a valid choice.
- In (2.20) and (2.21) indices i of options and times belong to block s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

SUB_PROBLEMS_AT_ONCE = 1000
"""Number of distinct sub-problems up to which memory is counted exactly."""

FEWER_SUB_PROBLEMS = 4
"""Least factor by which counting memory above G_t must reduce the sub-problems, since it rounds."""


HEADROOM = 1.5
"""Factor by which a table reaches beyond the budget it is for.

It rounds every size up and frees late, so plans for a larger nominal memory may truly fit.
"""


@dataclass(frozen=True)
class ChainOption:
    """One way to run a block forward and backward; bytes leave out the block's input."""

    time_s: float
    save_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int


@dataclass(frozen=True)
class ChainBlock:
    """A block as RK-Rotor sees it.

    Attributes:
        input_bytes: x_s; 0 for the first block, whose inputs are always in memory.
        gradient_bytes: g_s, the gradient of its output; 0 for the last block.
        resident_bytes: G_s.
        options: o > 0, when the output is needed.
        last_run_options: o > 0 for the last execution, when the output is not needed; same order and length.
        fast_time_s, fast_peak_bytes: F^0; infinite time where a block cannot be run without keeping anything.
    """

    input_bytes: int
    gradient_bytes: int
    resident_bytes: int
    options: Sequence[ChainOption]
    last_run_options: Sequence[ChainOption]
    fast_time_s: float
    fast_peak_bytes: int

    @property
    def fastest(self) -> int:
        """Return the fastest option; of equal ones the one that keeps least for backward."""
        return min(range(len(self.options)), key=lambda o: (self.options[o].time_s, self.options[o].save_bytes))

    @property
    def leanest(self) -> int:
        """Return the option that keeps least for backward; of equal ones the fastest."""
        return min(range(len(self.options)), key=lambda o: (self.options[o].save_bytes, self.options[o].time_s))


@dataclass(frozen=True)
class ChainStep:
    """One step of the sequence: `fast` F^0, `forward` F^o, `backward` B^o, or `drop` the input of a block."""

    kind: Literal["fast", "forward", "backward", "drop"]
    block: int
    option: int = -1
    last_run: bool = False


class RkRotor:
    """The table of Algorithm 5, for every memory from 0 to `slots` slots of `slot_bytes`.

    Sub-problems over equal blocks are equal, so that a model of equal layers has few: they share a row of the table.
    """

    def __init__(self, blocks: Sequence[ChainBlock], slots: int, slot_bytes: int) -> None:
        self.blocks = blocks
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._decided: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._row, distinct, self._base = _numbered(blocks)
        self._opt: Floats = np.full((len(distinct), slots + 1), np.inf)
        self._fast_time, self._fast_need = self._fast_forwards()
        self._input = np.array([self._up(b.input_bytes) for b in blocks], dtype=np.int64)
        # Algorithm 5: (2.22) for every sub-problem, short ones first.
        memory = np.arange(slots + 1)
        for row, (s, t) in enumerate(distinct):
            best = self._first_case(s, t, memory).min(axis=0)
            if t > s:
                best = np.minimum(best, self._second_case(s, t, memory).min(axis=0))
            self._opt[row] = best

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self.slot_bytes)

    def _fast_forwards(self) -> tuple[Floats, Slots]:
        """Return time and need in bytes of F^0_s … F^0_{i-1}, for every s < i; x_s is not counted."""
        count = len(self.blocks)
        time = np.full((count, count + 1), np.inf)
        need = np.zeros((count, count + 1), dtype=np.int64)
        for s in range(count):
            total, high = 0.0, 0
            for i in range(s + 1, count + 1):
                block = self.blocks[i - 1]
                total += block.fast_time_s
                high = max(high, (block.input_bytes if i - 1 > s else 0) + block.fast_peak_bytes)
                time[s, i], need[s, i] = total, high
        return time, need

    def _options(self, s: int, t: int) -> tuple[Floats, Slots, Slots]:
        """Return times, kept slots and needed slots of block s's options inside sub-problem s..t (validity of 2.20)."""
        last_run = s == t and t < len(self.blocks) - 1
        options = self.blocks[s].last_run_options if last_run else self.blocks[s].options
        waiting = self._waiting(t)
        staying = self.blocks[s].resident_bytes - int(self._base[t])
        need = [self._up(max(o.forward_peak_bytes + waiting, o.backward_peak_bytes + staying)) for o in options]
        return (
            np.array([o.time_s for o in options]),
            np.array([self._up(o.save_bytes) for o in options], dtype=np.int64),
            np.array(need, dtype=np.int64),
        )

    def _first_case(self, s: int, t: int, memory: Slots) -> Floats:
        """Return the times of (2.20), where block s runs once, with option o; rows are options, columns memory."""
        time, save, need = self._options(s, t)
        valid = memory[None, :] >= need[:, None]
        if s == t:
            return np.where(valid, time[:, None], np.inf)
        left = memory[None, :] - save[:, None]
        rest = np.where(left >= 0, self._opt[self._row[s + 1, t]][np.maximum(left, 0)], np.inf)
        return np.where(valid, time[:, None] + rest, np.inf)

    def _second_case(self, s: int, t: int, memory: Slots) -> Floats:
        """Return the times of (2.21): blocks s..i−1 run fast, x_i is kept; rows are i = s+1..t, columns memory."""
        borders = np.arange(s + 1, t + 1)
        need = -(-(self._fast_need[s, borders] + self._waiting(t)) // self.slot_bytes)
        left = memory[None, :] - self._input[borders][:, None]
        after = np.where(left >= 0, self._opt[self._row[borders, t][:, None], np.maximum(left, 0)], np.inf)
        left = memory[None, :] - self._shift(borders - 1, t)[:, None]
        before = self._opt[self._row[s, borders - 1][:, None], np.clip(left, 0, self.slots)]
        before = np.where(left >= 0, before, np.inf)
        total = self._fast_time[s, borders][:, None] + after + before
        return np.where(memory[None, :] >= need[:, None], total, np.inf)

    def _waiting(self, t: int) -> int:
        """Return bytes in memory from the start of s..t, above its base: g_t, and G_t unless that is the base."""
        block = self.blocks[t]
        return block.gradient_bytes + block.resident_bytes - int(self._base[t])

    def _shift(self, ends: Slots, t: int) -> Slots:
        """Return the slots between the base of a sub-problem s..t and those of sub-problems that end with `ends`."""
        shift: Slots = -((self._base[t] - self._base[ends]) // self.slot_bytes)
        return shift

    def time_s(self, slots: int) -> float:
        """Return Opt(0, L−1, slots), infinite when infeasible."""
        return float(self._opt[self._row[0, -1], slots])

    def smallest_slots(self) -> int | None:
        """Return the fewest slots for which a sequence exists, or None if `slots` is too few."""
        feasible = np.flatnonzero(np.isfinite(self._opt[self._row[0, -1]]))
        return int(feasible[0]) if len(feasible) else None

    def sequence(self, slots: int) -> list[ChainStep]:
        """Return the steps for a feasible number of slots (Algorithm 6, without recursion)."""
        steps: list[ChainStep] = []
        stack: list[tuple[int, int, int] | ChainStep] = [(0, len(self.blocks) - 1, slots)]
        while stack:
            item = stack.pop()
            if isinstance(item, ChainStep):
                steps.append(item)
                continue
            s, t, m = item
            option, i = self._decision(s, t, m)
            if option >= 0:
                last_run = s == t and t < len(self.blocks) - 1
                todo: list[tuple[int, int, int] | ChainStep] = [ChainStep("forward", s, option, last_run)]
                if t > s:
                    todo.append((s + 1, t, m - self._up(self.blocks[s].options[option].save_bytes)))
                todo.append(ChainStep("backward", s, option, last_run))
            else:
                todo = [ChainStep("fast", s)]
                for j in range(s + 1, i):
                    todo += [ChainStep("fast", j), ChainStep("drop", j)]
                todo += [(i, t, m - int(self._input[i])), ChainStep("drop", i), (s, i - 1, self._inside(i - 1, t, m))]
            stack.extend(reversed(todo))
        return steps

    def _decision(self, s: int, t: int, m: int) -> tuple[int, int]:
        """Return the option that runs block s once inside s..t; or −1 and the block up to which blocks run fast.

        Sequences for other memory have many of the same sub-problems.
        """
        found = self._decided.get((s, t, m))
        if found is None:
            memory = np.array([m])
            first = self._first_case(s, t, memory)[:, 0]
            option = int(first.argmin())
            second = self._second_case(s, t, memory)[:, 0] if t > s else np.array([np.inf])
            found = (option, t) if first[option] <= second.min() else (-1, s + 1 + int(second.argmin()))
            self._decided[s, t, m] = found
        return found

    def _inside(self, end: int, t: int, m: int) -> int:
        return min(m - int(self._shift(np.array([end]), t)[0]), self.slots)


def _numbered(blocks: Sequence[ChainBlock]) -> tuple[Slots, list[tuple[int, int]], Slots]:
    """Assign numbers to sub-problems, and return the bytes from which sub-problems s..t count memory: 0 or G_t."""
    resident = np.array([b.resident_bytes for b in blocks], dtype=np.int64)
    row, distinct = _equal_subproblems(blocks, resident)
    if len(distinct) <= SUB_PROBLEMS_AT_ONCE:
        return row, distinct, np.zeros_like(resident)
    relative_row, fewer = _equal_subproblems(blocks, np.diff(resident, append=resident[-1]))
    if len(fewer) * FEWER_SUB_PROBLEMS > len(distinct):
        return row, distinct, np.zeros_like(resident)
    return relative_row, fewer, resident - resident[-1]


def _equal_subproblems(blocks: Sequence[ChainBlock], resident: Slots) -> tuple[Slots, list[tuple[int, int]]]:
    """Give equal sub-problems (s, t) one number; return the numbers and the first (s, t) of each, short ones first.

    A sub-problem is known by its blocks, and by whether its last block is the chain's. `resident` tells blocks apart by
    the gradients that stay in memory.
    """
    count = len(blocks)
    kinds: dict[tuple[object, ...], int] = {}
    kind = []
    for b, stays in zip(blocks, resident.tolist()):
        costs = (b.input_bytes, b.gradient_bytes, stays, b.fast_time_s, b.fast_peak_bytes)
        kind.append(kinds.setdefault((*costs, tuple(b.options), tuple(b.last_run_options)), len(kinds)))
    row = np.full((count, count), -1, dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    distinct: list[tuple[int, int]] = []
    for length in range(count):
        for s in range(count - length):
            t = s + length
            rest = int(row[s + 1, t]) if length else -1 - (t == count - 1)
            number = numbers.setdefault((kind[s], rest), len(numbers))
            if number == len(distinct):
                distinct.append((s, t))
            row[s, t] = number
    return row, distinct
