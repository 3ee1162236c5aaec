"""Replays a plan of whole tensors, sharing no code with what made it: presence, validity, closure, memory and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from stowage.stages.formulations.offload.problem import OffloadProblem, ParameterGroup, ParameterTensor
from stowage.stages.formulations.offload.rounding.rounding import RoundedPlan


@dataclass
class Side:
    """Weights, or states: what is on the device, reloaded, offloaded, and valid in the lower tier."""

    device: set[str]
    valid: set[str]
    arriving: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)


@dataclass
class Replay:
    """Two iterations after one to warm up (at first nothing is known of copies made before)."""

    problem: OffloadProblem
    plan: RoundedPlan
    memory: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors: dict[str, tuple[ParameterGroup, ParameterTensor]] = {
            t.name: (g, t) for g in self.problem.groups for t in g.tensors
        }
        names = set(self.tensors)
        with_states = {n for n in names - self.plan.on_cpu if self.tensors[n][1].state_bytes}
        self.weights = Side(set(self.plan.resident), set(names))
        self.states = Side(set(self.plan.states_resident), with_states)
        assert self.plan.states_resident <= with_states
        self.waiting: set[str] = set()
        self.sent: dict[str, int] = {}
        self.updated: dict[str, float] = {}
        self.strict = False
        for iteration in range(3):
            self.strict = iteration > 0
            self.memory, self.times = [], []
            for t in range(self.problem.steps):
                self.step(t)
            for side, start in ((self.weights, self.plan.resident), (self.states, self.plan.states_resident)):
                assert side.device | set(side.arriving) == start
        assert tuple(self.memory) == self.plan.memory_bytes
        for mine, theirs in zip(self.times, self.plan.step_times_s):
            assert abs(mine - theirs) <= 1e-9 + 1e-9 * mine

    def sizes(self, side: Side, name: str) -> int:
        tensor = self.tensors[name][1]
        return tensor.nbytes if side is self.weights else tensor.state_bytes

    def step(self, t: int) -> None:
        transfers = self.plan.steps[t]
        changing = {n for n, (g, _) in self.tensors.items() if g.trainable and self.problem.last_gradient(g) == t}
        self.drop(self.weights, transfers.delete)
        self.drop(self.states, transfers.delete_states)
        self.arrive(self.weights, transfers.reload)
        self.arrive(self.states, transfers.reload_states)
        self.memory.append(self.memory_at(t))
        self.present(t, changing)
        for name in changing:
            self.weights.valid.discard(name)
            self.states.valid.discard(name)
            self.weights.leaving.pop(name, None)
            self.states.leaving.pop(name, None)
            if name in self.plan.on_cpu:
                self.sent[name], self.updated[name] = 0, 0.0
                self.waiting.discard(name)
        self.times.append(self.time_at(t, changing))
        self.go_down(self.weights, transfers.offload)
        self.go_down(self.states, transfers.offload_states)
        self.update(t)
        for name, nbytes in transfers.offload_gradients:
            self.sent[name] = self.sent.get(name, 0) + nbytes
            if self.sent[name] == self.tensors[name][1].nbytes:
                self.waiting.discard(name)
        for side in (self.weights, self.states):
            for name in [n for n, done in side.arriving.items() if done == self.sizes(side, n)]:
                del side.arriving[name]
                side.device.add(name)

    def drop(self, side: Side, names: tuple[str, ...]) -> None:
        for name in names:
            assert name in side.device
            assert name not in side.arriving
            side.device.discard(name)
            if side is self.weights and name in self.plan.on_cpu and name not in side.valid:
                # Its gradient takes its place until it is offloaded.
                if self.sent.get(name, 0) < self.tensors[name][1].nbytes:
                    self.waiting.add(name)
            elif self.strict:
                assert name in side.valid, f"{name} is dropped without a valid copy in the lower tier"

    def arrive(self, side: Side, moved: tuple[tuple[str, int], ...]) -> None:
        for name, nbytes in moved:
            if name not in side.arriving:
                if not self.strict:
                    # On its way since before step 0.
                    side.device.discard(name)
                assert name not in side.device
                if self.strict:
                    assert name in side.valid, f"{name} comes up from an invalid copy"
                side.arriving[name] = 0
            side.arriving[name] += nbytes
            assert side.arriving[name] <= self.sizes(side, name)

    def go_down(self, side: Side, moved: tuple[tuple[str, int], ...]) -> None:
        for name, nbytes in moved:
            assert name in side.device, f"{name} goes down and is not on the device"
            side.leaving[name] = side.leaving.get(name, 0) + nbytes
            if side.leaving[name] == self.sizes(side, name):
                side.valid.add(name)

    def update(self, t: int) -> None:
        for name, share in self.plan.steps[t].update:
            if self.strict:
                assert self.sent[name] == self.tensors[name][1].nbytes, (
                    f"{name} is updated before its gradient is offloaded"
                )
            self.updated[name] = self.updated.get(name, 0.0) + share
            if self.updated[name] > 1 - 1e-9 or not self.strict:
                self.weights.valid.add(name)

    def present(self, t: int, changing: set[str]) -> None:
        block = self.problem.block_of(t)
        needed = {n for n, (g, _) in self.tensors.items() if block in g.blocks}
        states = {n for n in changing if n not in self.plan.on_cpu and self.tensors[n][1].state_bytes}
        for side, names in ((self.weights, needed), (self.states, states)):
            if not self.strict:
                for name in names:
                    side.arriving.pop(name, None)
                side.device |= names
            assert names <= side.device, f"step {t} needs {names - side.device}"

    def memory_at(self, t: int) -> int:
        problem, machine = self.problem, self.problem.machine
        b = problem.block_of(t)
        chosen = [block.options[o] for block, o in zip(problem.blocks, self.plan.options)]
        used = machine.fixed_bytes + sum(g.pinned_bytes for g in problem.groups)
        used += sum(option.save_bytes for option in chosen[:b])
        if t < problem.L:
            used += chosen[b].forward_peak_bytes + problem.blocks[b].forward_resident_bytes
        else:
            used += chosen[b].backward_peak_bytes + problem.blocks[b].backward_resident_bytes
        for side in (self.weights, self.states):
            used += sum(self.sizes(side, n) for n in side.device | set(side.arriving))
        return used + sum(self.tensors[n][1].nbytes for n in self.waiting)

    def time_at(self, t: int, changing: set[str]) -> float:
        problem, machine, transfers = self.problem, self.problem.machine, self.plan.steps[t]
        b = problem.block_of(t)
        option = problem.blocks[b].options[self.plan.options[b]]
        down_moves = (*transfers.offload, *transfers.offload_states, *transfers.offload_gradients)
        down = sum(nbytes for _, nbytes in down_moves) + (option.offload_bytes if t < problem.L else 0)
        up = sum(nbytes for _, nbytes in (*transfers.reload, *transfers.reload_states))
        up += option.offload_bytes if t >= problem.L else 0
        own = sum(nbytes for name, nbytes in down_moves if name in changing)
        compute = option.forward_time_s if t < problem.L else option.backward_time_s
        compute += sum(self.tensors[n][1].device_update_s for n in changing - self.plan.on_cpu)
        compute += sum(g.pinned_update_s for g in problem.groups if problem.last_gradient(g) == t)
        cpu = machine.management_s + sum(share * self.tensors[n][1].cpu_update_s for n, share in transfers.update)
        link = machine.link
        times = [
            compute + own / link.offload_bytes_per_s,
            down / link.offload_bytes_per_s,
            up / link.reload_bytes_per_s,
            (down + up) / link.duplex_bytes_per_s,
            cpu,
        ]
        if machine.disk is not None:
            read, written = self.disk(t, option.disk_bytes)
            times += [read / machine.disk.reload_bytes_per_s, written / machine.disk.offload_bytes_per_s]
            times.append((read + written) / machine.disk.duplex_bytes_per_s)
        return max(times)

    def disk(self, t: int, activations: int) -> tuple[float, float]:
        transfers, there = self.plan.steps[t], self.plan.on_disk
        read = sum(n for name, n in (*transfers.reload, *transfers.reload_states) if name in there)
        written = sum(n for name, n in (*transfers.offload, *transfers.offload_states) if name in there)
        for name, share in transfers.update:
            if name in there:
                tensor = self.tensors[name][1]
                both = round(share * (tensor.nbytes + tensor.state_bytes))
                read, written = read + both, written + both
        if t < self.problem.L:
            return read, written + activations
        return read + activations, written
