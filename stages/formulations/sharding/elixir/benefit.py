"""Computes what memory of a device saves: as a block of the rCache (I), or for a chunk on the device (J) (5.1).

| symbol | here | meaning |
|---|---|---|
| L_c, L_os | `compute_bytes`, `master_bytes` | bytes of an element in computing, and in the optimizer |
| F_os | `copies` | copies of it that the optimizer has (master, and two of Adam's) |
| B_c2g, B_g2c, V_g, V_c | `machine` | rates of all ranks together |

As printed, for a chunk of C elements:

(1) I(n) = 1/L_c · (L_c C / B_g2c + L_c C / B_c2g)

(2) J(n) = n / (L_c + L_os F_os) · [(L_os C / B_c2g + L_c I(n) + L_c C / B_g2c) + (C / V_c − C / V_g)]

Both are seconds for a byte of each device, C times over; here they are for one element, C = 1. V_g and V_c are elements
per second, as the authors' profiling script measures them.

In (2) the chunk is copied to the devices for forward, leaves and comes back for backward (L_c I), and its gradient
leaves. Its first term has L_os, in the paper and in the authors' code, as if the float32 master were copied; but the
chunk that is copied has L_c bytes an element (4.1). `printed=False` puts L_c there.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.parallel import ParallelMachine


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: L_c, L_os, and F_os, how many of the latter the optimizer has."""

    compute_bytes: int = 2
    master_bytes: int = 4
    copies: int = 3

    @property
    def resident_bytes(self) -> int:
        """Return L_c + L_os F_os, the bytes of an element of a chunk on a device, before sharing it out."""
        return self.compute_bytes + self.master_bytes * self.copies


MIXED_PRECISION = Widths()
"""Half precision with a float32 master and Adam."""


def block_benefit(machine: ParallelMachine, widths: Widths) -> float:
    """Return I(n): seconds saved for each byte of a device that makes the rCache longer."""
    there = widths.compute_bytes / machine.reload_bytes_per_s
    back = widths.compute_bytes / machine.offload_bytes_per_s
    return (there + back) / widths.compute_bytes


def chunk_benefit(machine: ParallelMachine, widths: Widths, *, printed: bool = True) -> float:
    """Return J(n): seconds saved for each byte of a device that takes shards of a chunk."""
    copies = (
        (widths.master_bytes if printed else widths.compute_bytes) / machine.reload_bytes_per_s
        + widths.compute_bytes * block_benefit(machine, widths)
        + widths.compute_bytes / machine.offload_bytes_per_s
    )
    updates = 1 / machine.host_updates_per_s - 1 / machine.device_updates_per_s
    return machine.ranks / widths.resident_bytes * (copies + updates)
