"""Makes Elixir's greedy choice over the groups of FSDP2, with the transfers that FSDP2 makes.

A group takes the place of a chunk. I and J, derived again for one element, all of whose parts are trained:

- A kept group is not gathered again: with its shards on the host, s bytes less are copied to the devices, for c bytes
  of each device. I = (s / B_c2g) / c.
- A group on the devices is copied neither for forward (s) nor for backward (s), its gradient does not leave (s), and
  the devices update it; for (s + s + o) / n bytes of each: weights, gradients and states. J = n / (2 s + o) · (2 s /
  B_c2g + s / B_g2c + 1 / V_c − 1 / V_g).

With s = 4, c = 2 and o = 8: I = 2 / B_c2g; J = n / 16 · (8 / B_c2g + 4 / B_g2c + 1 / V_c − 1 / V_g).

The better one comes first, for as many groups as there is memory; then the other. The first groups are on the devices,
the last ones are kept: the gradients of what is on the host leave early in backward, and what is kept is what would be
copied twice.
"""

from __future__ import annotations

from collections.abc import Callable

from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice


def greedy_choices(problem: ShardingProblem) -> tuple[GroupChoice, ...] | None:
    """Return a choice for every group, or None where there is no memory even with all of them on the host."""
    costs = CostModel(problem)
    count = len(problem.groups)

    def fits(on_device: int, kept: int) -> bool:
        choices = _choices(problem, on_device, kept)
        return costs.device_bytes(choices) <= problem.device_budget and costs.host_total(choices) <= problem.host_budget

    # Where the host is small, some groups have to be on the devices.
    least = next(
        (k for k in range(count + 1) if costs.host_total(_choices(problem, k, 0)) <= problem.host_budget), None
    )
    if least is None or not fits(least, 0):
        return None
    if chunk_benefit_on_fsdp2(problem) > block_benefit_on_fsdp2(problem):
        on_device = _most(least, count, lambda k: fits(k, 0))
        kept = _most(0, count, lambda k: fits(on_device, k))
    else:
        kept = _most(0, count, lambda k: fits(least, k))
        on_device = _most(least, count, lambda k: fits(k, kept))
    return _choices(problem, on_device, kept)


def block_benefit_on_fsdp2(problem: ShardingProblem) -> float:
    """Return I, with the widths of the groups' average element."""
    groups = problem.groups
    stored = sum(g.elements * g.stored_bytes for g in groups)
    gathered = sum(g.elements * g.compute_bytes for g in groups)
    return problem.micro_batches * stored / problem.machine.reload_bytes_per_s / gathered


def chunk_benefit_on_fsdp2(problem: ShardingProblem) -> float:
    """Return J, with the widths of the groups' average element."""
    groups, m = problem.groups, problem.machine
    stored = sum(g.elements * g.stored_bytes for g in groups)
    gradients = sum(g.trainable * g.stored_bytes for g in groups)
    states = sum(g.trainable * g.state_bytes for g in groups)
    trainable = sum(g.trainable for g in groups)
    copies = 2 * stored / m.reload_bytes_per_s + gradients / m.offload_bytes_per_s
    updates = trainable / m.host_updates_per_s - trainable / m.device_updates_per_s
    return m.ranks / (stored + gradients + states) * (problem.micro_batches * copies + updates)


def _choices(problem: ShardingProblem, on_device: int, kept: int) -> tuple[GroupChoice, ...]:
    count = len(problem.groups)
    return problem.choices(set(range(on_device, count)), set(range(count - kept, count)))


def _most(least: int, most: int, good: Callable[[int], bool]) -> int:
    """Return the largest number that is good; `least` is, and what follows a bad one is bad."""
    while least < most:
        middle = (least + most + 1) // 2
        if good(middle):
            least = middle
        else:
            most = middle - 1
    return least
