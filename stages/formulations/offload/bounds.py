"""Physical limits on the time of an iteration (T_LB), for a machine, a problem and a budget: no plan is faster.

With x the fraction of trainable weights that the CPU updates, P their bytes, S those of the states, K_0 and K_turn what
the device has room for of weights and states beside the running block in F_0 and in the last forward:

- computing: every block with its fastest option, and (1−x) of the updates on the device;
- up: what is not kept over the turn is reloaded for backward, what is not kept in F_0 for forward and updates:
  max(0, P − K_turn) + max(xP, P + (1−x)S − K_0);
- down: gradients of what the CPU updates, and what the device updates and does not keep in F_0:
  xP + max(0, (1−x)(P + S) − K_0);
- both together over a duplex limit; x of the updates on the CPU; the disk for what the host has no room for.

Each of these grows or falls with x and is convex, so the least of their maximum over x is found by ternary search.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.formulations.offload.problem import OffloadProblem


@dataclass(frozen=True)
class OffloadBound:
    """A lower bound with its terms, seconds, at the x that makes the largest of them least.

    Attributes:
        compute_s, up_s, down_s, duplex_s, cpu_s, disk_read_s, disk_write_s: least time that each resource is busy.
        cpu_fraction: x.
    """

    compute_s: float
    up_s: float
    down_s: float
    duplex_s: float
    cpu_s: float
    disk_read_s: float
    disk_write_s: float
    cpu_fraction: float

    @property
    def terms(self) -> dict[str, float]:
        """Return the seconds of each resource, by name."""
        return {
            "compute": self.compute_s,
            "up": self.up_s,
            "down": self.down_s,
            "duplex": self.duplex_s,
            "cpu": self.cpu_s,
            "disk read": self.disk_read_s,
            "disk write": self.disk_write_s,
        }

    @property
    def total_s(self) -> float:
        """Return T_LB."""
        return max(self.terms.values())

    @property
    def binding(self) -> str:
        """Return the resource that determines the bound."""
        return max(self.terms, key=self.terms.__getitem__)


def lower_bound(problem: OffloadProblem) -> OffloadBound:
    """Compute T_LB of a problem within its machine's budget."""
    possible = sum(g.nbytes for g in problem.groups if problem.may_update_on_cpu(g))
    trainable = sum(g.nbytes for g in problem.groups if g.trainable)
    low, high = 0.0, possible / trainable if trainable else 0.0
    for _ in range(100):
        third = (high - low) / 3
        if _at(problem, low + third).total_s <= _at(problem, high - third).total_s:
            high -= third
        else:
            low += third
    return _at(problem, (low + high) / 2)


def _at(problem: OffloadProblem, x: float) -> OffloadBound:
    machine, groups = problem.machine, problem.groups
    trainable = sum(g.nbytes for g in groups if g.trainable)
    frozen = sum(g.nbytes for g in groups) - trainable
    states = sum(g.state_bytes for g in groups)
    # Take x of the bytes, at the most favourable price of each group.
    updated = [g for g in groups if g.trainable and g.nbytes]
    device_s = sum(g.device_update_s for g in updated)
    saved_s = x * trainable * max((g.device_update_s / g.nbytes for g in updated), default=0.0)
    cpu_s = x * trainable * min((g.cpu_update_s / g.nbytes for g in updated), default=0.0) if x else 0.0
    on_cpu_states = min(states, x * trainable * max((g.state_bytes / g.nbytes for g in updated), default=0.0))
    first, turn = _room(problem, 0), _room(problem, problem.L - 1)
    gradients = x * trainable
    absent = max(gradients, trainable + frozen + states - on_cpu_states - first, 0.0)
    up = max(0.0, trainable + frozen - turn) + absent + _activations(problem)
    down = gradients + max(0.0, trainable - gradients + states - on_cpu_states - first) + _activations(problem)
    compute_s = sum(min(o.forward_time_s + o.backward_time_s for o in b.options) for b in problem.blocks)
    compute_s += max(0.0, device_s - saved_s) + sum(g.pinned_update_s for g in groups)
    read = write = 0.0
    if machine.disk is not None:
        read = max(0.0, trainable + frozen + states - first - machine.host_bytes)
        write = max(0.0, read - frozen)
    link, disk = machine.link, machine.disk
    return OffloadBound(
        compute_s=compute_s,
        up_s=up / link.reload_bytes_per_s,
        down_s=down / link.offload_bytes_per_s,
        duplex_s=(up + down) / link.duplex_bytes_per_s,
        cpu_s=problem.steps * machine.management_s + cpu_s,
        disk_read_s=read / disk.reload_bytes_per_s if disk else 0.0,
        disk_write_s=write / disk.offload_bytes_per_s if disk else 0.0,
        cpu_fraction=x,
    )


def _room(problem: OffloadProblem, b: int) -> float:
    """Return K, the bytes that the device has room for beside F_b, whichever options are taken."""
    machine = problem.machine
    kept = sum(min(o.save_bytes for o in block.options) for block in problem.blocks[:b])
    peak = min(o.forward_peak_bytes for o in problem.blocks[b].options) + problem.blocks[b].forward_resident_bytes
    pinned = sum(g.pinned_bytes for g in problem.groups)
    return max(0.0, float(machine.device_bytes - machine.fixed_bytes - pinned - kept - peak))


def _activations(problem: OffloadProblem) -> int:
    return sum(min(o.offload_bytes for o in b.options) for b in problem.blocks)
