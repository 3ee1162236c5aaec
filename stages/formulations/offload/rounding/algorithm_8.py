"""Algorithm 8 (thesis 4.6): rounds the fractions of one group to whole tensors. `rounding.py` lists deviations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stowage.stages.formulations.offload.problem import OffloadProblem, ParameterGroup
from stowage.stages.formulations.offload.rounding.subset_sum import select_at_least, select_at_most
from stowage.stages.formulations.offload.rounding.tensors import Item

TOLERANCE = 2e-6
"""Share of a group within which fractions are equal."""


def leaves(item: Item) -> bool:
    """Say whether a tensor is ever released from the device."""
    return any(gap.reload is not None for gap in item.gaps)


class Algorithm8:
    """Runs Algorithm 8 for one group: through the cycle from g_w, in whole tensors."""

    def __init__(
        self,
        problem: OffloadProblem,
        group: ParameterGroup,
        items: list[Item],
        here: Sequence[float],
        stored: Sequence[float],
        offloaded: Sequence[float],
        gradients: Sequence[float],
    ) -> None:
        total = (group.state_bytes if items and items[0].states else group.nbytes) if items else 0
        self.problem, self.items = problem, dict(enumerate(items))
        self.allowed = [int(x * total + TOLERANCE * total) for x in here]
        self.stored = [int(x * total + TOLERANCE * total) for x in stored]
        self.offloaded = [x * total for x in offloaded]
        self.gradients = [x * total for x in gradients]
        self.slack = TOLERANCE * total
        self.alive = set(self.items)
        self.back: set[int] = set()
        self.dropped: set[int] = set()

    def run(self) -> None:
        """Set `offload` and `reload` of every item."""
        if not self.items or not self.items[0].gaps:
            return
        first = self.items[0]
        gaps = first.gaps
        start = first.change if first.change is not None else gaps[0].start
        places = {t: (number, k) for number, gap in enumerate(gaps) for k, t in enumerate(gap.steps)}
        sent = returning = 0.0
        for k in range(self.problem.steps):
            t, after = (start + k) % self.problem.steps, (start + k + 1) % self.problem.steps
            if first.change is not None:
                sent, returning = sent + self.gradients[t], returning + self.offloaded[t]
                self._down(k, sent, lambda i: i.on_cpu)
                self._down(k, returning, lambda i: not i.on_cpu)
                if gaps[0].offset == 0 and k >= len(gaps[0].steps) - 2:
                    self._down(k, float("inf"), lambda i: i.on_cpu)
            self.dropped = set()
            if after not in places:
                self._up(places.get(t), k, None)
                self.alive = set(self.items)
                self.back = set()
                continue
            if t not in places:
                self.back = set()
            number, index = places[after]
            room = self.allowed[t] - self._bytes(self.alive)
            self._drop(k, self.allowed[after], first_gap=number == 0)
            # What was reloaded is not dropped again before the need: it fits all steps until then.
            lasting = min(self.allowed[s] for s in gaps[number].steps[index:])
            self._up(places.get(t), k, min(room, min(self.stored[after], lasting) - self._bytes(self.alive)))
        for item in self.items.values():
            if not item.on_cpu and not leaves(item):
                item.offload = None

    def _bytes(self, numbers: set[int]) -> int:
        return sum(self.items[i].nbytes for i in numbers)

    def _sizes(self, wanted: Callable[[int], bool]) -> dict[int, int]:
        return {i: item.nbytes for i, item in self.items.items() if wanted(i)}

    def _down(self, k: int, target: float, kind: Callable[[Item], bool]) -> None:
        r"""Choose Offload[t] = SELECT(T \ ofl, Σ Ofl − |ofl|)."""
        sent_bytes = sum(i.nbytes for i in self.items.values() if i.offload is not None and kind(i))
        open_ = self._sizes(lambda i: self.items[i].offload is None and kind(self.items[i]) and i in self.alive)
        missing = target - self.slack - sent_bytes
        if missing <= 0 or not open_:
            return
        for i in select_at_least(open_, int(min(missing, float(sum(open_.values()))))):
            self.items[i].offload = k

    def _drop(self, k: int, allowed: int, *, first_gap: bool) -> None:
        """Choose Delete[t+1] = SELECT(ofl ∩ alive, |alive| − Sto); offloaded gradients are released at once."""
        self.dropped = {i for i in self.alive if self.items[i].on_cpu and self.items[i].offload == k}
        self.alive -= self.dropped
        excess = self._bytes(self.alive) - allowed
        if excess <= 0:
            return
        valid = self._sizes(
            lambda i: (
                i in self.alive
                and i not in self.back
                and not (first_gap and self.items[i].on_cpu)
                and (self.items[i].change is None or self.items[i].offload is not None)
            )
        )
        chosen = set(select_at_least(valid, excess))
        excess -= self._bytes(chosen)
        if excess > 0:
            # Rounding left too little in the lower tier for the drop: offload more in this very step.
            others = self._sizes(lambda i: i in self.alive and i not in self.back and self.items[i].offload is None)
            more = select_at_least(others, excess)
            for i in more:
                self.items[i].offload = k
            chosen.update(more)
        self.alive -= chosen
        self.dropped |= chosen

    def _up(self, place: tuple[int, int] | None, k: int, room: int | None) -> None:
        """Choose Prefetch[t]: as much as the fractions have in this step and in the next; all if `room` is None."""
        if place is None:
            return
        gap_number, index = place
        returning = self._sizes(lambda i: i not in self.alive and self._may_return(i, k, gap_number))
        if room is not None and room <= 0:
            return
        chosen = returning if room is None else select_at_most(returning, room)
        for i in chosen:
            self.items[i].gaps[gap_number].reload = index
        self.alive.update(chosen)
        self.back.update(chosen)

    def _may_return(self, i: int, k: int, gap_number: int) -> bool:
        """Return whether a tensor was released in an earlier step; a gradient's update takes one in between."""
        item = self.items[i]
        if i in self.dropped:
            return False
        if item.offload is None:
            return True
        if item.on_cpu and gap_number == 0:
            return item.offload + 2 <= k
        return item.offload < k
