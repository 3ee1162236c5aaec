"""Local search on a rounded plan: shifts single transfers while that makes the iteration faster.

A transfer may begin earlier, end later, extend over several steps, or not happen at all. Memory never exceeds the
device budget in any step (nor what it was, where it was more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.offload.rounding.tensors import Item, Loads

ROUNDS = 12
SHIFTS = (0, 1, -1, 2, -2, 3, -3, 5, -5, 8, -8)
_GAIN = 1e-9


def smooth(loads: Loads, items: Sequence[Item]) -> None:
    """Improve the schedule of `items` in place; `loads` are theirs."""
    search = _Search(loads)
    for _ in range(ROUNDS):
        before = search.cost
        for item in items:
            search.improve(item)
        if search.cost > before * (1 - 1e-4):
            break


def fill_cpu(loads: Loads, item: Item) -> None:
    """Put the update of an item on the CPU where steps have time left, the first such steps first.

    The rest goes where the step is longest already. The item is counted.
    """
    loads.count(item, -1)
    gap = item.gaps[0]
    assert item.offload is not None
    assert gap.reload is not None
    steps = gap.steps[item.offload : gap.reload]
    missing = item.tensor.cpu_update_s
    item.updates = {}
    for lasting in (loads.goal_s, None):
        for t in steps:
            time_s = loads.time_s(t) if lasting is None else min(lasting[t], loads.time_s(t))
            room = time_s - loads.problem.machine.management_s - loads.cpu_s[t] - item.updates.get(t, 0.0)
            taken = min(missing, max(0.0, room))
            if taken > 0:
                item.updates[t] = item.updates.get(t, 0.0) + taken
                missing -= taken
    if missing > 1e-12 or not item.updates:
        t = max(steps, key=loads.time_s)
        item.updates[t] = item.updates.get(t, 0.0) + max(0.0, missing)
    loads.count(item, 1)


@dataclass(frozen=True)
class _Kept:
    """A schedule of an item to go back to."""

    offload: int | None
    down: dict[int, int]
    updates: dict[int, float]
    gaps: tuple[tuple[int | None, dict[int, int]], ...]

    @staticmethod
    def of(item: Item) -> _Kept:
        gaps = tuple((gap.reload, gap.up) for gap in item.gaps)
        return _Kept(item.offload, item.down, item.updates, gaps)

    def restore(self, item: Item) -> None:
        item.offload, item.down, item.updates = self.offload, self.down, self.updates
        for gap, (reload, up) in zip(item.gaps, self.gaps):
            gap.reload, gap.up = reload, up


class _Search:
    """Keeps the cost of every step, so that a change costs only the steps that it touches."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.steps = loads.problem.steps
        budget = loads.problem.machine.device_bytes
        self.limit = [max(budget, used) for used in loads.memory]
        self.costs = [self._cost(t) for t in range(self.steps)]
        self.cost = sum(self.costs)

    def _cost(self, t: int) -> float:
        # Among equal times it prefers lower loads, which leave room for others.
        loads = self.loads
        link = loads.problem.machine.link
        busy = loads.down_bytes[t] / link.offload_bytes_per_s + loads.up_bytes[t] / link.reload_bytes_per_s
        return loads.time_s(t) + 1e-4 * busy

    def improve(self, item: Item) -> None:
        """Try every change of an item, keeping those that help."""
        for change in list(self._changes(item)):
            self._try(item, *change)

    def _changes(self, item: Item) -> Iterator[tuple[int | None, tuple[int | None, ...]]]:
        """Yield changes to try: the last step of the offload, and the first step of the reload in each gap."""
        reloads = tuple(gap.reload for gap in item.gaps)
        for number, gap in enumerate(item.gaps):
            if gap.reload is None:
                continue
            if not (item.on_cpu and number == 0):
                stays = (*reloads[:number], None, *reloads[number + 1 :])
                leaves = item.on_cpu or any(r is not None for r in stays)
                yield item.offload if leaves else None, stays
            for shift in SHIFTS:
                if 0 <= gap.reload + shift < len(gap.steps):
                    yield item.offload, (*reloads[:number], gap.reload + shift, *reloads[number + 1 :])
        if item.offload is not None:
            for shift in SHIFTS:
                if 0 <= item.offload + shift < self.steps - 1:
                    yield item.offload + shift, reloads

    def _try(self, item: Item, offload: int | None, reloads: Iterable[int | None]) -> None:
        kept = _Kept.of(item)
        touched = set(self._touched(item))
        self.loads.count(item, -1)
        if self._apply(item, offload, tuple(reloads)):
            touched.update(self._touched(item))
            after = {t: self._cost(t) for t in touched}
            gain = sum(self.costs[t] for t in touched) - sum(after.values())
            if gain > _GAIN and all(self.loads.memory[t] <= self.limit[t] for t in item.on_device()):
                for t, cost in after.items():
                    self.costs[t] = cost
                self.cost -= gain
                return
            self.loads.count(item, -1)
        kept.restore(item)
        self.loads.count(item, 1)

    def _apply(self, item: Item, offload: int | None, reloads: tuple[int | None, ...]) -> bool:
        """Schedule an item that is not counted, and count it; return False, not counting it, where it is illegal."""
        loads = self.loads
        item.offload, item.down = offload, {}
        for gap, reload in zip(item.gaps, reloads):
            gap.reload, gap.up = reload, {}
        if item.on_cpu:
            item.updates = {}
        if not item.legal() or (item.on_cpu and item.offload == item.gaps[0].reload):
            return False
        loads.count(item, 1)
        if item.change is not None and offload is not None:
            window = [(item.change + k) % self.steps for k in range(offload + 1)]
            item.down = self._spread(window, item.nbytes, lambda t, time_s: loads.room_down(item, t, time_s))
            for t, nbytes in item.down.items():
                loads.add_down(item, t, nbytes)
        if item.on_cpu:
            fill_cpu(loads, item)
        for gap in item.gaps:
            if gap.reload is not None:
                window = list(reversed(gap.steps[gap.reload :]))
                gap.up = self._spread(window, item.nbytes, lambda t, time_s: loads.room_up(item, t, time_s))
                for t, nbytes in gap.up.items():
                    loads.add_up(item, t, nbytes)
        loads.count(item, -1)
        # Memory follows the steps that the transfers take in the end.
        if item.change is not None and item.offload is not None:
            item.offload = max((t - item.change) % self.steps for t in item.down)
        for gap in item.gaps:
            if gap.reload is not None:
                gap.reload = min(gap.steps.index(t) for t in gap.up)
        if not item.legal():
            return False
        loads.count(item, 1)
        return True

    def _touched(self, item: Item) -> Iterator[int]:
        """Yield the steps whose time depends on the item's schedule."""
        if item.change is not None:
            yield item.change
        yield from item.down
        for gap in item.gaps:
            yield from gap.up
        yield from item.updates

    def _spread(self, window: Sequence[int], nbytes: int, room: Callable[[int, float], int]) -> dict[int, int]:
        """Spread bytes over steps, in the order given.

        First goes what fits while no step is longer than it should be, then what fits while no step becomes longer; the
        rest goes to the last step.
        """
        found: dict[int, int] = {}
        missing = nbytes
        for goal in (True, False):
            for t in window:
                time_s = self.loads.time_s(t)
                fitting = room(t, min(time_s, self.loads.goal_s[t]) if goal else time_s) - found.get(t, 0)
                taken = min(missing, max(0, fitting))
                # A sliver is not worth another transfer.
                if taken and (taken * 64 >= nbytes or taken == missing):
                    found[t] = found.get(t, 0) + taken
                    missing -= taken
                if not missing:
                    return found
        found[window[-1]] = found.get(window[-1], 0) + missing
        return found
