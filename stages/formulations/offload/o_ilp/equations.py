"""The rows of O-ILP (see `model` for symbols and deviations), and its objective.

4.5 and 4.6 are not rows: at steps that need a parameter or its states, `Moving.stored` is the whole (r, and r − X_w).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stowage.stages.formulations.offload.o_ilp.model import OIlp, OIlpLimits, finite
from stowage.stages.formulations.offload.o_ilp.quantities import Moving, Portion
from stowage.stages.formulations.offload.problem import OffloadProblem
from stowage.stages.ir.machine import Link, Placement
from stowage.stages.solver.equations import Constraints, add_equations
from stowage.stages.solver.milp import pulp

TRANSFER_COST = 2e-4
"""Weight of transfer time in the objective, so that nothing is transferred in vain.

Both directions together take at most twice the iteration, so the bound loses a factor of 1 + 2·TRANSFER_COST at most.
"""


def eq_4_1(m: OIlp) -> Constraints:
    """Choose one option per block."""
    for i, comp in enumerate(m.comp):
        yield f"{i}", pulp.lpSum(comp) == 1
        if m.limits.options is not None:
            yield f"given_{i}", comp[m.limits.options[i]] == 1


def eq_4_3(m: OIlp) -> Constraints:
    """Limit fractions by the whole; the portions of a group make the whole group (4.3′ where r is not 1)."""
    for number in sorted({p.number for p in m.portions}):
        portions = [p for p in m.portions if p.number == number]
        if len(portions) > 1:
            yield f"size_{number}", pulp.lpSum(p.size for p in portions) == m.scale
        if m.limits.cpu_fractions is not None and not isinstance(portions[0].on_cpu, int):
            given = m.limits.cpu_fractions[number]
            yield f"given_{number}", pulp.lpSum(p.on_cpu for p in portions) == given * m.scale
    for p in m.portions:
        for x in p.movings:
            for variable in x.variables():
                if isinstance(p.size, int):
                    variable.upBound = p.size
                else:
                    yield variable.name, variable <= p.size


def eq_4_4(m: OIlp) -> Constraints:
    """Limit X_w to a fraction; the gradient's offload and the update proceed from g_w, and are not undone."""
    for p in m.portions:
        if p.cpu is None:
            continue
        yield f"{p.cpu.window[0]}_X_{p.number}{p.placement}", p.on_cpu <= p.size
        for t, after in zip(p.cpu.window, p.cpu.window[1:]):
            for what, value in (("sent", p.cpu.sent), ("done", p.cpu.done)):
                if value(t) is not value(after) and not isinstance(value(t), int):
                    yield f"{t}_{what}_{p.number}{p.placement}", value(t) <= value(after)


def eq_4_7(m: OIlp) -> Constraints:
    """Require that what is neither on the device nor updated on the CPU was offloaded since g_w, in an earlier step."""
    for p in m.portions:
        if p.weights is not None:
            yield from _has_a_copy(p, p.weights)


def eq_4_8(m: OIlp) -> Constraints:
    """Require the same of states as 4.7 of weights."""
    for p in m.portions:
        if p.states is not None:
            yield from _has_a_copy(p, p.states)


def _has_a_copy(p: Portion, x: Moving) -> Constraints:
    if x.change is None:
        return
    for t in range(x.steps):
        after = (t + 1) % x.steps
        if t not in x.needed and not (x.stored(after) is x.stored(t) and x.valid(after) is x.valid(t)):
            yield f"{x.name}_{t}", x.stored(t) + x.valid(t) >= p.size - p.on_cpu
        if after != x.change and x.valid(after) is not x.valid(t):
            yield f"on_{x.name}_{t}", x.valid(after) >= x.valid(t)


def eq_4_9(m: OIlp) -> Constraints:
    """Keep on the device only what was there or was reloaded in the step before."""
    for p in m.portions:
        if p.weights is not None:
            yield from _arrives(p.weights)


def eq_4_10(m: OIlp) -> Constraints:
    """Keep only states on the device that were there or were reloaded in the step before."""
    for p in m.portions:
        if p.states is not None:
            yield from _arrives(p.states)


def _arrives(x: Moving) -> Constraints:
    for t in range(x.steps):
        after = (t + 1) % x.steps
        if x.stored(after) is not x.stored(t):
            yield f"{x.name}_{t}", x.stored(after) <= x.stored(t) + x.reloaded(t)


def eq_4_12(m: OIlp) -> Constraints:
    """Update on the CPU in step t only what has a gradient in the lower tier by then."""
    for p in m.portions:
        if p.cpu is not None:
            for t, after in zip(p.cpu.window, p.cpu.window[1:]):
                if p.cpu.sent(t) is not p.on_cpu:
                    yield f"{p.number}{p.placement}_{t}", p.cpu.done(after) <= p.cpu.sent(t)


def eq_4_13(m: OIlp) -> Constraints:
    """Keep what waits for its update on the CPU off the device, and do not reload it.

    With 4.5 at f_w this contains 4.11: all of X_w is updated, and then reloaded.
    """
    for p in m.portions:
        if p.cpu is not None and p.weights is not None:
            previous: tuple[int, int] | None = None
            for t in p.cpu.window:
                stored, reloaded, done = p.weights.stored(t), p.weights.reloaded(t), p.cpu.done(t)
                same = (id(stored), id(done))
                if same != previous or not isinstance(reloaded, int):
                    yield f"{p.number}{p.placement}_{t}", stored + reloaded <= p.size - p.on_cpu + done
                previous = same


def weights_in_memory(m: OIlp, t: int) -> Any:
    """Return W_t (4.14), in bytes, with gradients that wait to be offloaded to the CPU."""
    terms = []
    for p in m.portions:
        if p.weights is None:
            terms.append(p.group.nbytes * p.size)
        else:
            terms.append(p.group.nbytes * (p.weights.stored(t) + p.weights.reloaded(t)))
        if p.cpu is not None:
            terms.append(p.group.nbytes * p.cpu.waiting(t))
    return pulp.lpSum(terms)


def states_in_memory(m: OIlp, t: int) -> Any:
    """Return O_t (4.15), in bytes."""
    found = [p.states for p in m.portions if p.states is not None]
    return pulp.lpSum(x.nbytes * (x.stored(t) + x.reloaded(t)) for x in found)


def eq_4_16(m: OIlp) -> Constraints:
    """Define the running sum of what blocks up to i keep for their backward (S and A)."""
    for i, kept in enumerate(m.kept):
        before = m.kept[i - 1] if i else 0
        yield f"{i}", kept == before + m.chosen(i, lambda o: o.save_bytes) * (1 / m.memory_unit)


def eq_4_17(m: OIlp) -> Constraints:
    """Limit the memory of each step; S_t and A_t are what earlier blocks keep and the running one's peak."""
    problem, machine = m.problem, m.problem.machine
    always = machine.fixed_bytes + sum(g.pinned_bytes for g in problem.groups)
    for t in range(problem.steps):
        b = problem.block_of(t)
        block = problem.blocks[b]
        if t < problem.L:
            constant = always + block.forward_resident_bytes
            peak = m.chosen(b, lambda o: o.forward_peak_bytes)
        else:
            fixed = block.fixed_backward_bytes
            constant = always + block.backward_resident_bytes + fixed
            peak = m.chosen(b, lambda o, fixed=fixed: o.backward_peak_bytes - fixed)
        moving = weights_in_memory(m, t) + states_in_memory(m, t)
        kept = m.kept[b - 1] if b else 0
        yield f"{t}", (moving + peak + constant * m.scale) * (1 / m.memory_unit) + kept <= m.budget * m.scale


def eq_4_18(m: OIlp) -> Constraints:
    """Limit the bytes in the lower tier: slots of what is ever offloaded (placement ≥ r − Sto_t), and activations.

    Gradients and states of what the CPU updates count too.
    """
    yield from _room(m, "host", m.problem.machine.host_bytes)


def disk_room(m: OIlp) -> Constraints:
    """Limit the disk behind the host likewise; gradients stay in the host."""
    if m.problem.machine.disk is not None:
        yield from _room(m, "disk", m.problem.machine.disk_bytes)


def _room(m: OIlp, placement: Placement, room_bytes: int) -> Constraints:
    groups = [p.group for p in m.portions if p.placement == placement]
    activations = [max(o.offload_bytes for o in b.options) for b in m.problem.blocks]
    batch = m.limits.batch[1] if m.limits.batch else 1.0
    if sum(2 * g.nbytes + g.state_bytes for g in groups) + batch * sum(activations) <= room_bytes:
        return
    terms: list[Any] = []
    for p in m.portions:
        gradients = p.on_cpu * p.group.nbytes
        if placement == "host":
            terms.append(gradients)
        if p.placement != placement:
            continue
        terms.append(p.on_cpu * p.group.state_bytes)
        for x in p.movings:
            variable = pulp.LpVariable(f"Home_{x.name}", lowBound=0)
            terms.append(x.nbytes * variable)
            for number, stored in enumerate({id(v): v for v in map(x.stored, range(x.steps))}.values()):
                if isinstance(stored, pulp.LpVariable) and stored is not x.whole:
                    yield f"home_{x.name}_{number}", variable >= x.whole - stored
    for i in range(m.problem.L):
        if placement == "disk":
            terms.append(m.chosen(i, lambda o: o.disk_bytes))
        else:
            terms.append(m.chosen(i, lambda o: o.offload_bytes - o.disk_bytes))
    yield "", pulp.lpSum(terms) * (1 / m.memory_unit) <= m.units(room_bytes) * m.scale


def own_offload_s(m: OIlp, t: int) -> Any:
    """Return L_t (4.19), the time of offloads after the updates of step t: of what is updated, and of gradients."""
    terms = []
    for p in m.portions:
        if m.problem.last_gradient(p.group) == t and p.group.trainable:
            terms += [x.nbytes * x.offloaded(t) for x in p.movings]
            if p.cpu is not None:
                terms.append(p.group.nbytes * p.cpu.gradient(t, t))
    return pulp.lpSum(terms) * (1 / m.problem.machine.link.offload_bytes_per_s)


def eq_4_19(m: OIlp) -> Constraints:
    """Let a forward step last at least as long as its computing."""
    for t in range(m.problem.L):
        yield f"{t}", m.time[t] >= m.chosen(t, lambda o: o.forward_time_s) * (1 / m.time_unit)


def eq_4_20(m: OIlp) -> Constraints:
    """Let a backward step last for its computing, the updates on the device and the offloads after these."""
    for t in range(m.problem.L, m.problem.steps):
        computing = m.chosen(m.problem.block_of(t), lambda o: o.backward_time_s)
        groups = [g for g in m.problem.groups if m.problem.last_gradient(g) == t]
        pinned = sum(g.pinned_update_s for g in groups) * m.scale
        updates = pulp.lpSum(
            p.group.device_update_s * (p.size - p.on_cpu)
            for p in m.portions
            if m.problem.last_gradient(p.group) == t and p.group.device_update_s
        )
        yield f"{t}", m.time[t] >= (computing + updates + pinned + own_offload_s(m, t)) * (1 / m.time_unit)


def eq_4_21(m: OIlp) -> Constraints:
    """Let a step last at least as long as its reloads, activations included."""
    yield from _transfer(m, m.up, m.problem.machine.link.reload_bytes_per_s)


def eq_4_22(m: OIlp) -> Constraints:
    """Let a step last at least as long as its offloads, activations included."""
    yield from _transfer(m, m.down, m.problem.machine.link.offload_bytes_per_s)


def duplex(m: OIlp) -> Constraints:
    """Share the link's common limit between both directions."""
    yield from _transfer(m, lambda t: m.down(t) + m.up(t), m.problem.machine.link.duplex_bytes_per_s)


def eq_4_23(m: OIlp) -> Constraints:
    """Let a step last for the CPU's management of it and its updates."""
    management_s = m.problem.machine.management_s
    for t in range(m.problem.steps):
        updates = [p.group.cpu_update_s * p.cpu.updated(t) for p in m.portions if p.cpu is not None]
        busy = pulp.lpSum(updates) + management_s * m.scale
        if busy:
            yield f"{t}", m.time[t] >= busy * (1 / m.time_unit)


def disk_read(m: OIlp) -> Constraints:
    """Let a step last at least as long as its copies from the disk to the host."""
    yield from _transfer(m, m.read, _disk(m.problem).reload_bytes_per_s)


def disk_write(m: OIlp) -> Constraints:
    """Let a step last at least as long as its copies from the host to the disk."""
    yield from _transfer(m, m.written, _disk(m.problem).offload_bytes_per_s)


def disk_duplex(m: OIlp) -> Constraints:
    """Share the disk's common limit between both directions."""
    yield from _transfer(m, lambda t: m.read(t) + m.written(t), _disk(m.problem).duplex_bytes_per_s)


def _disk(problem: OffloadProblem) -> Link:
    return problem.machine.disk or Link(math.inf, math.inf)


def _transfer(m: OIlp, moved: Callable[[int], Any], bytes_per_s: float) -> Constraints:
    if finite(bytes_per_s):
        for t in range(m.problem.steps):
            yield f"{t}", m.time[t] >= moved(t) * (1 / bytes_per_s / m.time_unit)


EQUATIONS: dict[str, Callable[[OIlp], Constraints]] = {
    "4.1": eq_4_1,
    "4.3": eq_4_3,
    "4.4": eq_4_4,
    "4.7": eq_4_7,
    "4.8": eq_4_8,
    "4.9": eq_4_9,
    "4.10": eq_4_10,
    "4.12": eq_4_12,
    "4.13": eq_4_13,
    "4.16": eq_4_16,
    "4.17": eq_4_17,
    "4.18": eq_4_18,
    "disk_room": disk_room,
    "4.19": eq_4_19,
    "4.20": eq_4_20,
    "4.21": eq_4_21,
    "4.22": eq_4_22,
    "duplex": duplex,
    "4.23": eq_4_23,
    "disk_read": disk_read,
    "disk_write": disk_write,
    "disk_duplex": disk_duplex,
}
"""The function that writes each equation.

4.2 is the bound of Time; 4.5 and 4.6 are substituted (`Moving.stored`); 4.11 is in 4.13; 4.14 and 4.15 are expressions
in 4.17.
"""

TIMES = frozenset({"4.19", "4.20", "4.21", "4.22", "duplex", "4.23", "disk_read", "disk_write", "disk_duplex"})
"""Equations of the time of steps, left out where the smallest budget is searched for."""


def build(problem: OffloadProblem, limits: OIlpLimits) -> OIlp:
    """Build the whole model, which minimises Σ Time, or the budget."""
    m = OIlp(problem, limits)
    link = problem.machine.link
    if limits.device_free:
        m.model += m.budget * 1.0, "budget"
    else:
        down = pulp.lpSum(m.down(t) for t in range(problem.steps)) * (1 / link.offload_bytes_per_s / m.time_unit)
        up = pulp.lpSum(m.up(t) for t in range(problem.steps)) * (1 / link.reload_bytes_per_s / m.time_unit)
        m.model += pulp.lpSum(m.time) + TRANSFER_COST * (down + up), "time"
    add_equations(m.model, EQUATIONS, m, leave_out=TIMES if limits.device_free else ())
    return m
