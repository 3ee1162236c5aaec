"""Describes the problem: groups of parameters on a machine, within a budget of each device and of the host."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup


@dataclass(frozen=True)
class ShardingProblem:
    """What is to be planned.

    Attributes:
        groups: all groups, in the order in which forward first uses them.
        machine: ranks and rates.
        device_budget: bytes that a step may use of one device.
        host_budget: bytes that all ranks together may use of the host.
        micro_batches: forwards and backwards before an update.
        ahead: groups that are gathered while one computes.
        fixed_bytes: whatever else is on each device: buffers, the batch, the driver's own.
        copies: collectives copy what they work on, as gloo does.
        host_is_device: the device is a CPU: what is in the host takes the device's own memory.
        host_updates_beside: the host updates beside computing, as sharded plans do; FSDP2 waits for it.
    """

    groups: tuple[ParameterGroup, ...]
    machine: ParallelMachine
    device_budget: int
    host_budget: int
    micro_batches: int = 1
    ahead: int = 1
    fixed_bytes: int = 0
    copies: bool = False
    host_is_device: bool = False
    host_updates_beside: bool = False

    def choices(self, on_host: set[int], keep: set[int]) -> tuple[GroupChoice, ...]:
        """Make a choice for every group; what the root gathers is always kept."""
        return tuple(GroupChoice(g.group, i in on_host, i in keep or g.is_root) for i, g in enumerate(self.groups))
