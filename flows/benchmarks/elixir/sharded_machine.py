"""Describes one rank of a parallel machine as planning a sharded step sees it: a device, and its part of the host.

All rates are those that the simulator of groups uses, divided by the ranks that share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.machine import Link
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.solve import LowerTier

UPDATE_BYTES = 30
"""Bytes that an update moves for each element: reads of gradient and weight (2 each), master and two states (4 each),

and writes of all but the gradient.
"""

NO_DISK_BYTES_PER_S = 1.0

NO_DISPATCH_S = 1e-9
"""The tables of groups count nothing for starting an operation."""


@dataclass(frozen=True)
class ShardedMachine:
    """One rank of a machine.

    Attributes:
        device: the device, with the rates of collectives.
        host: the rank's part of the host.
    """

    device: DeviceDescription
    host: LowerTier


def sharded_machine(machine: ParallelMachine, matmul_flops: float, memory_bytes_per_s: float) -> ShardedMachine:
    """Describe one rank of a machine.

    Args:
        machine: rates of all ranks together.
        matmul_flops: FLOP/s of large matrix products on one device.
        memory_bytes_per_s: rate of a device's own memory.
    """
    n = machine.ranks
    device = DeviceDescription(
        fingerprint="".join(x if x.isalnum() else "-" for x in machine.name.replace("×", "x")),
        name=machine.name,
        type="cuda",
        memory_bytes=machine.device_bytes,
        flops_per_s=matmul_flops,
        memory_copy_bytes_per_s=memory_bytes_per_s,
        disk_read_bytes_per_s=NO_DISK_BYTES_PER_S,
        disk_write_bytes_per_s=NO_DISK_BYTES_PER_S,
        disk_duplex_bytes_per_s=NO_DISK_BYTES_PER_S,
        update_bytes_per_s=UPDATE_BYTES * machine.device_updates_per_s / n,
        dispatch_s=NO_DISPATCH_S,
        offload_bytes_per_s=machine.offload_bytes_per_s / n,
        reload_bytes_per_s=machine.reload_bytes_per_s / n,
        duplex_bytes_per_s=machine.duplex_bytes_per_s / n,
        cpu_update_bytes_per_s=UPDATE_BYTES * machine.host_updates_per_s / n,
        collective_bytes_per_s=machine.collective_bytes_per_s if n > 1 else 0.0,
        collective_s=machine.collective_latency_s if n > 1 else 0.0,
    )
    host = LowerTier(
        Link(
            device.offload_bytes_per_s,
            device.reload_bytes_per_s,
            device.duplex_bytes_per_s,
            carries_collectives=machine.collectives_share_link,
        ),
        capacity_bytes=machine.host_bytes // n,
        cpu_update_bytes_per_s=device.cpu_update_bytes_per_s,
    )
    return ShardedMachine(device, host)
