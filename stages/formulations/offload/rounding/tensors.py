"""Whole tensors in the cycle of steps: where each is, what it takes in every step, and how long steps become.

A step is as in `problem`: drops and allocations at its start; transfers count from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stowage.stages.formulations.offload.problem import OffloadProblem, ParameterGroup, ParameterTensor


@dataclass
class Gap:
    """The steps between two needs of an item.

    Attributes:
        start: the step of the need before it.
        steps: the steps in between, in order.
        offset: steps from the item's last change to `start`.
        reload: index into `steps` of the step in which its reload begins, or None while it stays.
        up: bytes reloaded in each step.
    """

    start: int
    steps: tuple[int, ...]
    offset: int
    reload: int | None = None
    up: dict[int, int] = field(default_factory=dict)


@dataclass
class Item:
    """The weight of a tensor, or all its states, transferred together.

    Attributes:
        group, tensor: its group, and the tensor.
        states: these are the states.
        nbytes: bytes that it takes on the device.
        change: g_w, or None for what never changes.
        gaps: between its needs; the first one starts at `change`, if any.
        on_cpu: the weight is updated on the CPU: its gradient is offloaded, and the first gap always has a reload.
        on_disk: its placement is the disk behind the host.
        offload: steps from `change` to the one in which its offload (or its gradient's) ends, or None if it stays.
        down: bytes offloaded in each step.
        updates: seconds of its update on the CPU in each step.
    """

    group: ParameterGroup
    tensor: ParameterTensor
    states: bool
    nbytes: int
    change: int | None
    gaps: list[Gap]
    on_cpu: bool = False
    on_disk: bool = False
    offload: int | None = None
    down: dict[int, int] = field(default_factory=dict)
    updates: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(problem: OffloadProblem, group: ParameterGroup, tensor: ParameterTensor, *, states: bool) -> Item:
        """Make an item that stays on the device."""
        change = problem.last_gradient(group) if group.trainable else None
        needs = (problem.last_gradient(group),) if states else problem.uses(group)
        start = needs.index(change) if change is not None else 0
        gaps = []
        for k in range(len(needs)):
            a, b = needs[(start + k) % len(needs)], needs[(start + k + 1) % len(needs)]
            offset = (a - needs[start]) % problem.steps
            if steps := problem.after(a, b):
                gaps.append(Gap(a, steps, offset))
        nbytes = tensor.state_bytes if states else tensor.nbytes
        return Item(group, tensor, states, nbytes, change, gaps)

    def whole_transfers(self, steps: int) -> None:
        """Put each transfer within one step."""
        self.down = {}
        if self.change is not None and self.offload is not None:
            self.down = {(self.change + self.offload) % steps: self.nbytes}
        for gap in self.gaps:
            gap.up = {} if gap.reload is None else {gap.steps[gap.reload]: self.nbytes}

    def first_step_off(self, gap: Gap) -> int:
        """Return the index of the first step of a gap with a reload in which the item is not on the device."""
        if self.change is None or self.offload is None:
            return 0
        return max(0, self.offload - gap.offset)

    def on_device(self) -> Iterator[int]:
        """Yield steps between needs in which it takes device memory: kept, reloading, or as a waiting gradient."""
        for gap in self.gaps:
            if gap.reload is None:
                yield from gap.steps
            else:
                yield from gap.steps[: self.first_step_off(gap)]
                yield from gap.steps[gap.reload :]

    def legal(self) -> bool:
        """Say whether its schedule can be executed."""
        leaves = [gap for gap in self.gaps if gap.reload is not None]
        if self.on_cpu:
            if self.gaps[0].reload is None or self.offload is None:
                return False
            place = {t: k for k, t in enumerate(self.gaps[0].steps)}
            first = min((place[t] for t in self.updates), default=self.offload)
            last = max((place[t] for t in self.updates), default=self.offload)
            # The gradient is offloaded `offload` steps after the change, that is during steps[offload − 1].
            return self.offload <= first and last < self.gaps[0].reload
        if not leaves:
            return self.offload is None
        if (self.offload is None) != (self.change is None):
            return False
        return all(gap.reload is not None and self.first_step_off(gap) < gap.reload for gap in leaves)


@dataclass
class Loads:
    """The loads of every step.

    Attributes:
        problem: the problem, for its rates.
        memory: device bytes.
        compute_s: computing, and updates on the device.
        own_bytes: offloaded after the step's own updates.
        down_bytes, up_bytes: over the link.
        cpu_s: updates on the CPU.
        written_bytes, read_bytes: copied to and from the disk behind the host.
        goal_s: how long a step should be; steps that are longer for now must not attract more.
    """

    problem: OffloadProblem
    memory: list[int]
    compute_s: list[float]
    own_bytes: list[int]
    down_bytes: list[int]
    up_bytes: list[int]
    cpu_s: list[float]
    written_bytes: list[int]
    read_bytes: list[int]
    goal_s: tuple[float, ...]
    _times_s: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(
        problem: OffloadProblem, options: tuple[int, ...], items: Iterable[Item], goal_s: tuple[float, ...]
    ) -> Loads:
        """Count everything (4.14 to 4.17)."""
        machine, steps = problem.machine, problem.steps
        always = machine.fixed_bytes + sum(g.pinned_bytes for g in problem.groups)
        zero = [0] * steps
        loads = Loads(
            problem=problem,
            memory=[always] * steps,
            compute_s=[0.0] * steps,
            own_bytes=zero[:],
            down_bytes=zero[:],
            up_bytes=zero[:],
            cpu_s=[0.0] * steps,
            written_bytes=zero[:],
            read_bytes=zero[:],
            goal_s=goal_s,
        )
        kept = 0
        for b, (block, o) in enumerate(zip(problem.blocks, options)):
            option, back = block.options[o], problem.backward(b)
            loads.memory[b] += kept + block.forward_resident_bytes + option.forward_peak_bytes
            loads.memory[back] += kept + block.backward_resident_bytes + option.backward_peak_bytes
            loads.compute_s[b] += option.forward_time_s
            loads.compute_s[back] += option.backward_time_s
            loads.down_bytes[b] += option.offload_bytes
            loads.up_bytes[back] += option.offload_bytes
            loads.written_bytes[b] += option.disk_bytes
            loads.read_bytes[back] += option.disk_bytes
            kept += option.save_bytes
        for group in problem.groups:
            loads.compute_s[problem.last_gradient(group)] += group.pinned_update_s
        for item in items:
            for t in _needs(problem, item):
                loads.memory[t] += item.nbytes
            loads.count(item, 1)
        return loads

    def count(self, item: Item, sign: int) -> None:
        """Add or subtract an item's transfers and updates, and its memory between needs."""
        for t in item.on_device():
            self.memory[t] += sign * item.nbytes
        for gap in item.gaps:
            for t, nbytes in gap.up.items():
                self.add_up(item, t, sign * nbytes)
        for t, nbytes in item.down.items():
            self.add_down(item, t, sign * nbytes)
        if item.states or item.change is None:
            return
        if not item.on_cpu:
            self._times_s.pop(item.change, None)
            self.compute_s[item.change] += sign * item.tensor.device_update_s
        for t, seconds in item.updates.items():
            self._times_s.pop(t, None)
            self.cpu_s[t] += sign * seconds
            if item.on_disk:
                share = seconds / item.tensor.cpu_update_s if item.tensor.cpu_update_s else 1.0
                moved = round(share * (item.tensor.nbytes + item.tensor.state_bytes))
                self.read_bytes[t] += sign * moved
                self.written_bytes[t] += sign * moved

    def add_up(self, item: Item, t: int, nbytes: int) -> None:
        """Add bytes of an item that are reloaded in step t."""
        self._times_s.pop(t, None)
        self.up_bytes[t] += nbytes
        if item.on_disk:
            self.read_bytes[t] += nbytes

    def add_down(self, item: Item, t: int, nbytes: int) -> None:
        """Add bytes of an item that are offloaded in step t."""
        self._times_s.pop(t, None)
        self.down_bytes[t] += nbytes
        if t == item.change:
            self.own_bytes[t] += nbytes
        if item.on_disk and not item.on_cpu:
            self.written_bytes[t] += nbytes

    def room_down(self, item: Item, t: int, time_s: float) -> int:
        """Return the bytes of an item that can be offloaded in step t if it takes `time_s`."""
        machine = self.problem.machine
        link = machine.link
        rooms = [
            time_s * link.offload_bytes_per_s - self.down_bytes[t],
            time_s * link.duplex_bytes_per_s - self.down_bytes[t] - self.up_bytes[t],
        ]
        if t == item.change:
            rooms.append((time_s - self.compute_s[t]) * link.offload_bytes_per_s - self.own_bytes[t])
        if machine.disk is not None and item.on_disk and not item.on_cpu:
            rooms.append(time_s * machine.disk.offload_bytes_per_s - self.written_bytes[t])
            rooms.append(time_s * machine.disk.duplex_bytes_per_s - self.written_bytes[t] - self.read_bytes[t])
        return max(0, int(min(rooms)))

    def room_up(self, item: Item, t: int, time_s: float) -> int:
        """Return the bytes of an item that can be reloaded in step t if it takes `time_s`."""
        machine = self.problem.machine
        link = machine.link
        rooms = [
            time_s * link.reload_bytes_per_s - self.up_bytes[t],
            time_s * link.duplex_bytes_per_s - self.down_bytes[t] - self.up_bytes[t],
        ]
        if machine.disk is not None and item.on_disk:
            rooms.append(time_s * machine.disk.reload_bytes_per_s - self.read_bytes[t])
            rooms.append(time_s * machine.disk.duplex_bytes_per_s - self.written_bytes[t] - self.read_bytes[t])
        return max(0, int(min(rooms)))

    def time_s(self, t: int) -> float:
        """Return Time_t (4.19 to 4.23)."""
        found = self._times_s.get(t)
        if found is None:
            found = self._times_s[t] = self._time_s(t)
        return found

    def _time_s(self, t: int) -> float:
        machine = self.problem.machine
        link, disk = machine.link, machine.disk
        found = max(
            self.compute_s[t] + self.own_bytes[t] / link.offload_bytes_per_s,
            self.down_bytes[t] / link.offload_bytes_per_s,
            self.up_bytes[t] / link.reload_bytes_per_s,
            (self.down_bytes[t] + self.up_bytes[t]) / link.duplex_bytes_per_s,
            machine.management_s + self.cpu_s[t],
        )
        if disk is not None:
            found = max(
                found,
                self.read_bytes[t] / disk.reload_bytes_per_s,
                self.written_bytes[t] / disk.offload_bytes_per_s,
                (self.read_bytes[t] + self.written_bytes[t]) / disk.duplex_bytes_per_s,
            )
        return found

    def total_s(self) -> float:
        """Return Σ Time_t."""
        return sum(map(self.time_s, range(self.problem.steps)))


def _needs(problem: OffloadProblem, item: Item) -> tuple[int, ...]:
    return (problem.last_gradient(item.group),) if item.states else problem.uses(item.group)
