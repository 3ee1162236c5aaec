"""O-ILP chooses the options of blocks, and which fractions of parameters and states are transferred when (thesis 4.5).

| symbol | here | meaning | unit |
|---|---|---|---|
| L, 2L | `problem.L`, `problem.steps` | blocks, steps (cyclic, from 0) | – |
| Comp[i,o] | `comp` | block i runs with option o | 0/1 |
| Time[t] | `time` | duration of step t | time unit |
| Sto[t,w], StoO[t,w] | `Moving.stored(t)` | fraction on the device all through step t | – |
| Prf[t,w], PrfO[t,w] | `Moving.reloaded(t)` | fraction reloaded during step t | – |
| Ofl[t,w], OflO[t,w] | `Moving.offloaded(t)` | fraction offloaded during step t | – |
| – | `Cpu.gradient(t)` | fraction whose gradient is offloaded during step t, to be updated on the CPU | – |
| Opt[t,w] | `Cpu.updated(t)` | fraction updated on the CPU during step t | – |
| X_w | `Portion.on_cpu` | fraction updated on the CPU at all | – |
| r | `scale` | 1, or 1/batch where the batch is chosen (4.5.3) | – |
| f_w, g_w | `problem.first_use`, `last_gradient` | first use, last gradient | step |

Sums Σ_{t'=g_w}^{t} are variables of their own (`Moving.valid`, `Cpu.sent`, `Cpu.done`: what has been done *before*
step t since g_w), and Ofl and Opt are differences of them: rows stay short.

Where this differs from the thesis, and why:

- 4.7, 4.8: what is offloaded during step t is in memory during step t, and may be released from step t+1 on. The
  thesis lets it be released in step t itself.
- 4.4, 4.12, 4.13: likewise an update on the CPU takes a later step than the gradient's offload, and the reload a later
  one than the update. With "∀t" as printed, 4.13 at t = g_w, where 4.5 has everything stored, says X_w = 0; and a
  gradient that waits on the device for its offload would count as a stored parameter and could not be waited for. So
  waiting gradients are counted apart (`Cpu.waiting`).
- 4.7 for what never changes: its copy in the lower tier is always valid; nothing is offloaded.
- 4.17: the running block takes its whole peak (working memory and gradients included), earlier blocks what they keep;
  and there are bytes that are never offloaded (small tensors, buffers), which the reference tool forgets.
- 4.18: only what is ever offloaded needs room in the lower tier, not Σ|w|; so does the gradient of a CPU update.
- 4.19: L_t lacks k at OflO. It and the update concern w with g_w = t, not every w in P_{B(t)}: a tied parameter is
  updated once.
- 4.20: the update on the device divides by α_G (the preprint divides by α_C).
- 4.21, 4.22: activations of the options use the same link. Down and up have their own rates, and a common limit.
- 4.5′ must be ≥ r and 4.6′ ≥ r − X_w (swapped in the thesis); gradients in a block's peak do not shrink with the batch.
- Extended by a disk behind the host: a portion of each group is placed there (`Portion`). It passes through the host
  on its way, so it takes the same link, and the disk's time and room as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stowage.stages.formulations.offload.o_ilp.quantities import Cpu, Moving, Portion
from stowage.stages.formulations.offload.problem import OffloadOption, OffloadProblem, ParameterGroup
from stowage.stages.ir.machine import Placement
from stowage.stages.solver.milp import pulp


@dataclass(frozen=True)
class OIlpLimits:
    """The limits on what the model may decide.

    Attributes:
        options: option of each block, where that is decided already.
        cpu_fractions: X_w of each group, where that is decided already.
        relaxed: Comp may be fractional.
        batch: lowest and highest batch; `problem` is then for a batch of 1 (4.5.3).
        reach: a transfer happens at most this many steps from the use that it follows or serves. None is the whole
            formulation; a number makes it smaller for long chains (a restriction: solutions remain solutions).
        device_free: minimise the budget, and ignore time.
    """

    options: tuple[int, ...] | None = None
    cpu_fractions: tuple[float, ...] | None = None
    relaxed: bool = False
    batch: tuple[float, float] | None = None
    reach: int | None = None
    device_free: bool = False


@dataclass(eq=False)
class OIlp:
    """Holds data, variables and problem; `equations.build` adds the rows."""

    problem: OffloadProblem
    limits: OIlpLimits
    model: Any = field(default_factory=lambda: pulp.LpProblem("o_ilp", pulp.LpMinimize))
    _sums: dict[tuple[str, int], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        machine = self.problem.machine
        self.time = [pulp.LpVariable(f"Time_{t}", lowBound=0) for t in range(self.problem.steps)]
        category = pulp.LpContinuous if self.limits.relaxed else pulp.LpBinary
        self.comp = [
            [pulp.LpVariable(f"Comp_{i}_{o}", 0, 1, cat=category) for o in range(len(block.options))]
            for i, block in enumerate(self.problem.blocks)
        ]
        self.scale: Any = 1
        if self.limits.batch is not None:
            low, high = self.limits.batch
            self.scale = pulp.LpVariable("r", 1.0 / high, 1.0 / low)
        self.budget: Any = machine.device_bytes / self.memory_unit
        if self.limits.device_free:
            self.budget = pulp.LpVariable("Budget", lowBound=0)
        self.kept = [pulp.LpVariable(f"Kept_{i}", lowBound=0) for i in range(self.problem.L)]
        placements: tuple[Placement, ...] = ("host",) if machine.disk is None else ("host", "disk")
        self.portions = [
            self._portion(number, group, placement, placements)
            for number, group in enumerate(self.problem.groups)
            for placement in placements
            if group.tensors
        ]

    def _portion(
        self, number: int, group: ParameterGroup, placement: Placement, placements: tuple[Placement, ...]
    ) -> Portion:
        problem, name = self.problem, f"{number}{placement[0] if len(placements) > 1 else ''}"
        size = self.scale if len(placements) == 1 else pulp.LpVariable(f"Size_{name}", 0)
        change = problem.last_gradient(group) if group.trainable else None
        on_cpu: Any = 0
        if problem.may_update_on_cpu(group) and not self._fixed_to_zero(number):
            on_cpu = pulp.LpVariable(f"X_{name}", 0)
        steps, reach = problem.steps, self.limits.reach
        weights = states = cpu = None
        if len(problem.uses(group)) < steps:
            weights = Moving(name, group.nbytes, size, problem.uses(group), change, steps, reach)
        if group.state_bytes:
            needed = [problem.last_gradient(group)]
            states = Moving(f"{name}O", group.state_bytes, size - on_cpu, needed, change, steps, reach)
        if not isinstance(on_cpu, int):
            window = problem.after(problem.last_gradient(group), problem.first_use(group))
            cpu = Cpu(name, on_cpu, window, reach)
        return Portion(group, number, placement, size, on_cpu, weights, states, cpu)

    def _fixed_to_zero(self, number: int) -> bool:
        return self.limits.cpu_fractions is not None and self.limits.cpu_fractions[number] <= 0

    # Units: solvers like numbers around one, so the rows are in these.

    @cached_property
    def memory_unit(self) -> float:
        """Return the bytes of one memory unit."""
        return max(1.0, self.problem.machine.device_bytes / 1000)

    @cached_property
    def time_unit(self) -> float:
        """Return the seconds of one time unit: a thousandth of the fastest computing, as far as there is any."""
        fastest = sum(min(o.forward_time_s + o.backward_time_s for o in b.options) for b in self.problem.blocks)
        moved = (
            sum(g.nbytes + g.state_bytes for g in self.problem.groups) / self.problem.machine.link.reload_bytes_per_s
        )
        return max(fastest, moved * 1e-3) / 1000 or 1.0

    def units(self, nbytes: float) -> float:
        """Convert bytes to memory units."""
        return nbytes / self.memory_unit

    # Expressions.

    def chosen(self, i: int, value: Any) -> Any:
        """Return Σ_o Comp_i^o · value(o)."""
        return pulp.lpSum(
            value(option) * self.comp[i][o] for o, option in enumerate(self.problem.blocks[i].options) if value(option)
        )

    def down(self, t: int) -> Any:
        """Return bytes over the link in step t, device to host."""
        return self._once("down", t, self._down)

    def _down(self, t: int) -> Any:
        terms = [x.nbytes * x.offloaded(t) for p in self.portions for x in p.movings]
        terms += [
            p.group.nbytes * p.cpu.gradient(t, self.problem.last_gradient(p.group)) for p in self.portions if p.cpu
        ]
        if t < self.problem.L:
            terms.append(self.chosen(t, _offloaded))
        return pulp.lpSum(terms)

    def up(self, t: int) -> Any:
        """Return bytes over the link in step t, host to device."""
        return self._once("up", t, self._up)

    def _up(self, t: int) -> Any:
        terms = [x.nbytes * x.reloaded(t) for p in self.portions for x in p.movings]
        if t >= self.problem.L:
            terms.append(self.chosen(self.problem.block_of(t), _offloaded))
        return pulp.lpSum(terms)

    def written(self, t: int) -> Any:
        """Return bytes from the host to the disk in step t: offloads to the disk, and what was updated there."""
        return self._once("written", t, self._written)

    def _written(self, t: int) -> Any:
        terms = [x.nbytes * x.offloaded(t) for p in self._on_disk for x in p.movings]
        terms += [(p.group.nbytes + p.group.state_bytes) * p.cpu.updated(t) for p in self._on_disk if p.cpu]
        if t < self.problem.L:
            terms.append(self.chosen(t, _to_disk))
        return pulp.lpSum(terms)

    def read(self, t: int) -> Any:
        """Return bytes from the disk to the host in step t."""
        return self._once("read", t, self._read)

    def _read(self, t: int) -> Any:
        terms = [x.nbytes * x.reloaded(t) for p in self._on_disk for x in p.movings]
        terms += [(p.group.nbytes + p.group.state_bytes) * p.cpu.updated(t) for p in self._on_disk if p.cpu]
        if t >= self.problem.L:
            terms.append(self.chosen(self.problem.block_of(t), _to_disk))
        return pulp.lpSum(terms)

    def _once(self, name: str, t: int, make: Callable[[int], Any]) -> Any:
        """Return a sum that several rows have, made once for each step."""
        if (name, t) not in self._sums:
            self._sums[name, t] = make(t)
        return self._sums[name, t]

    @cached_property
    def _on_disk(self) -> list[Portion]:
        return [p for p in self.portions if p.placement == "disk"]


def _offloaded(option: OffloadOption) -> int:
    return option.offload_bytes


def _to_disk(option: OffloadOption) -> int:
    return option.disk_bytes


def finite(rate: float) -> bool:
    """Say whether a rate limits anything."""
    return not math.isinf(rate)
