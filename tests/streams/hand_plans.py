"""Plans without a solver for any model of the zoo, in which nearly everything moves all the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from stowage.flows.planning.by_rules import Rules, Woven, blank_summary, stretches
from stowage.stages.codegen import emit_step
from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, Link, TierState
from stowage.stages.ir.plan import Slot
from stowage.stages.ir.step import Step
from stowage.stages.ir.trace import TraceTables, base_values
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import replay_plan
from stowage.stages.simulate.slots import slots_of
from stowage.stages.trace import MicroBatch, trace_step
from tests.runtime.beside_eager import MakeOptimizer
from tests.zoo import Entry

SMALLEST = 256
"""Bytes of parameters, states and gradients that move."""


@dataclass(frozen=True)
class Way:
    """How things move.

    Attributes:
        ahead: nodes between a reload and its use.
        lag: nodes between a use and the end of its offload.
        activations: they are offloaded between forward and backward.
        cpu_updates: parameters are updated by the CPU.
        gradients: those that wait for another micro-batch are offloaded meanwhile.
        around: what is under way at the end is waited for in the next iteration: updates by the CPU, offloads of what
            was used last, reloads of what is used first.
        disk: of so many storages one lives on a disk; 0 without one.
        any_form: the CPU also updates parameters whose gradient is a view of what was computed.
    """

    ahead: int = 3
    lag: int = 2
    activations: bool = True
    cpu_updates: bool = False
    gradients: bool = False
    around: bool = False
    disk: int = 0
    any_form: bool = False


@dataclass(frozen=True)
class HandPlan:
    """A generated step and what it needs.

    Attributes:
        trace: of the step.
        source: its text.
        slots: places in the lower tier.
        peak_bytes: highest device bytes, predicted.
    """

    trace: TraceTables
    source: str
    slots: list[Slot]
    peak_bytes: int


class HandMade:
    """A step's tables and compute nodes: forward, backward, then updates."""

    def __init__(self, build: Callable[[], Entry], optimizer: MakeOptimizer, micro_batch: MicroBatch) -> None:
        model, batch, loss = build()
        self.trace: TraceTables = trace_step(
            model, batch, loss=loss, optimizer=optimizer(model), micro_batch=micro_batch
        )
        self.rules = Rules(self.trace, movable_bytes=SMALLEST)
        self.nodes, self.storages, self.movable = self.rules.nodes, self.trace.storages, self.rules.movable

    def _by_cpu(self, node: ComputeNode, way: Way) -> int:
        """The parameter that the CPU may update there."""
        parameter = self.rules.updated(node)
        if parameter < 0 or way.any_form:
            return parameter
        gradient = self.trace.values[self.trace.calls[node.calls[0]].reads[0]]
        base = self.trace.values[base_values(self.trace)[gradient.storage]]
        forms = [(v.shape, v.stride, v.offset) for v in (gradient, base)]
        return parameter if forms[0] == forms[1] else -1

    def keep_all(self) -> HandPlan:
        """Every node once, nothing moves."""
        return self._finish(self.rules.keep_all().steps, EVERYTHING_ON_DEVICE)

    def recompute_all(self) -> HandPlan:
        """What forward made is dropped before backward and made again, node by node, where backward reads it."""
        return self._finish(self.rules.recompute_all().steps, EVERYTHING_ON_DEVICE)

    def streaming(self, way: Way) -> HandPlan:
        """What moves comes before each use and leaves after it."""
        on_cpu = {n.node: p for n in self.nodes if way.cpu_updates and (p := self._by_cpu(n, way)) in self.movable}
        by_cpu = {s: n for n in on_cpu for s in self.nodes[n].mutates if s in self.movable}
        moving = {s for s in self.movable if way.gradients or self.storages[s].role != "gradient"}
        uses: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node.node not in on_cpu:
                for storage in {*node.reads, *node.mutates, *node.creates}:
                    uses[storage].append(node.node)
        woven = Woven()
        reloading, offloading = set[int](), set[int]()
        for storage in sorted(moving):
            if uses[storage]:
                self._stream(storage, uses[storage], way, woven, reloading, offloading, by_cpu.get(storage, -1))
        if way.activations:
            for storage in sorted(self.rules.temporary - self.rules.spent - self.rules.keep):
                if self.storages[storage].nbytes >= SMALLEST and uses[storage]:
                    self._stream_activation(storage, uses[storage], way, woven)
        offloaded_again = self._down(on_cpu)
        late = self._left_in_lower_tier(way)
        updating = set(on_cpu.values()) if way.around else set()
        for parameter in sorted(on_cpu.values()):
            wait = Step(-1, parameter, "lower tier", "wait")
            if way.around:
                node = next(n for n in self.nodes if self.rules.updated(n) == parameter)
                touched = [n for s in node.mutates for n in uses[s] if s in moving and n not in on_cpu]
                woven.before[max(0, min(touched, default=0) - way.ahead)].insert(0, wait)
            else:
                woven.last.append(wait)
        steps = self._steps(woven, on_cpu, offloaded_again, late)
        offloaded = moving - reloading - offloading
        copied = (moving | offloading) - (by_cpu.keys() if way.around else set()) - offloading
        placed = sorted(moving | offloaded_again.keys() | late)
        state = TierState(
            offloaded=frozenset(offloaded),
            reloading=frozenset(reloading),
            offloading=frozenset(offloading),
            copied=frozenset(copied),
            updating=frozenset(updating),
            on_disk=frozenset(placed[:: way.disk] if way.disk else ()),
        )
        return self._finish(steps, state)

    def _stream(
        self,
        storage: int,
        places: list[int],
        way: Way,
        woven: Woven,
        reloading: set[int],
        offloading: set[int],
        update: int,
    ) -> None:
        """A parameter, a state, or a gradient that waits; it is gone before its update by the CPU, if there is one."""
        last = len(self.nodes) - 1
        free_from = 0
        found = stretches(places, way.ahead + way.lag + 2)
        for number, (first, end) in enumerate(found):
            start = max(free_from, first - way.ahead)
            early = way.around and number == 0 and start == 0 and update < 0 and found[-1][1] + way.lag < last
            if early:
                woven.last.append(Step(-1, storage, "up", "reload"))
                reloading.add(storage)
            else:
                woven.before[start].append(Step(-1, storage, "up", "reload"))
            woven.before[first].append(Step(-1, storage, "up", "wait"))
            leave = min(end + way.lag, last if update < 0 else update - 1)
            free_from = leave + 1
            if storage in self.rules.spent and number == len(found) - 1:
                continue  # its update uses it up
            if any(storage in self.nodes[n].mutates for n in places if first <= n <= end):
                woven.after[end].append(Step(-1, storage, "down", "offload"))
                if way.around and leave == last and found[0][0] - way.ahead > 1:
                    offloading.add(storage)
                    woven.before[0] += [Step(-1, storage, "down", "wait"), Step(-1, storage, "down")]
                    continue
                woven.after[leave].append(Step(-1, storage, "down", "wait"))
            woven.after[leave].append(Step(-1, storage, "down"))

    def _stream_activation(self, storage: int, places: list[int], way: Way, woven: Woven) -> None:
        """It is made, goes down once, and comes back for each later use."""
        found = stretches(places, way.ahead + way.lag + 2)
        for (first, end), (after, _) in pairwise(found):
            leave = end + way.lag
            if first == found[0][0]:
                woven.after[end].append(Step(-1, storage, "down", "offload"))
                woven.after[leave].append(Step(-1, storage, "down", "wait"))
            woven.after[leave].append(Step(-1, storage, "down"))
            woven.before[max(leave + 1, after - way.ahead)].append(Step(-1, storage, "up", "reload"))
            woven.before[after].append(Step(-1, storage, "up", "wait"))

    def _down(self, on_cpu: dict[int, int]) -> dict[int, int]:
        """What updates by the CPU read that is made here -> the first such update: gradients, the scale of clipping."""
        found: dict[int, int] = {}
        for node in on_cpu:
            for storage in self.nodes[node].reads:
                if storage in self.rules.temporary:
                    found.setdefault(storage, node)
        return found

    def _left_in_lower_tier(self, way: Way) -> set[int]:
        """Gradients that are made here and wait in the lower tier for the next micro-batch."""
        if not way.gradients:
            return set()
        made = {self.trace.values[g.gradient_value].storage for g in self.trace.gradients if g.gradient_value >= 0}
        return {s for s in made & self.rules.keep & self.rules.temporary if self.storages[s].nbytes >= SMALLEST}

    def _steps(self, woven: Woven, on_cpu: dict[int, int], down: dict[int, int], late: set[int]) -> list[Step]:
        steps: list[Step] = []
        for step in self.rules.with_frees(range(len(self.nodes))):
            if step.node < 0:
                if step.storage not in self.rules.spent.intersection(down):
                    steps.append(step)
                continue
            steps += woven.before[step.node]
            if step.node in on_cpu:
                for storage in [s for s, first in down.items() if first == step.node]:
                    steps += [Step(-1, storage, "lower tier", "offload"), Step(-1, storage, "lower tier", "wait")]
                    if storage in self.rules.spent:
                        steps.append(Step(-1, storage, "lower tier"))
                steps.append(Step(step.node, on_cpu[step.node], "lower tier", "update"))
            else:
                steps.append(step)
            steps += woven.after[step.node]
        for storage in sorted(late):
            steps += [Step(-1, storage, "lower tier, waiting", action) for action in ("offload", "wait", "free")]  # type: ignore[arg-type]
        return steps + woven.last

    def _finish(self, steps: list[Step], state: TierState) -> HandPlan:
        outcome = replay_plan(
            self.storages,
            self.nodes,
            steps,
            keep=self.rules.keep,
            start=state,
            tier=ReplayedTier(
                Link(1e9, 1e9, 1.5e9),
                Link(5e8, 5e8, 8e8) if state.on_disk else None,
                cpu_update_s={n.node: 1e-3 for n in self.nodes if n.phase == "update"},
            ),
        )
        slots = slots_of(self.trace, steps, state)
        source = emit_step(self.trace, self.nodes, outcome.rows, blank_summary(), slots)
        return HandPlan(self.trace, source, slots, outcome.peak_bytes)
