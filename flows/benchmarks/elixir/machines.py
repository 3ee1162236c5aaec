"""Describes the machines of the Elixir paper, by its Tables 4 and 5, for any number of GPUs.

How the tables are read, by the scripts that measured them (hpcaitech/Elixir, `profile/`) where there is one:

- `B_c2g(n)`, `B_g2c(n)`: gigabytes per second between the host and all GPUs together.
- `V_g(n)`, `V_c(n)`: 10⁹ elements that all ranks together update per second, with gradients in float32.
- `B_g2g(n)`, which no script measures: of all GPUs together, as the others: 58 GB/s cannot be one GPU's, whose PCIe
  link has 25; so each receives B_g2g / (n − 1).

Between the table's numbers of GPUs, the next smaller one's rates are taken. Beyond the table there are several such
nodes, each with its own host; the collectives go over a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stowage.stages.ir.parallel import ParallelMachine

GB, GIB = 10**9, 1 << 30

NETWORK_BYTES_PER_S = 25 * GB
"""Of one GPU to other nodes, assumed: 200 Gbit/s for each."""

LATENCY_S = 30e-6
"""Time of a collective of no bytes, assumed."""

USABLE = 0.95
"""Share of a device's memory that can be used, the rest being fragments: F_alloc of the paper, for every engine."""

DRIVER_BYTES = 1 * GIB
"""What the driver, its libraries and NCCL hold of a device, assumed."""


@dataclass(frozen=True)
class Rates:
    """One line of Table 4 or 5: GB/s, and 10⁹ updates per second; B_g2g of one GPU is 0."""

    between: float
    reload: float
    offload: float
    device_update: float
    host_update: float


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted to a part of the published cells, one set for each machine.

    Attributes:
        matmul_flops: FLOP/s of large matrix products.
        host_share: rate of Elixir's updates on the host over Table 4's.
        zero_2_share, zero_3_share: the same of DeepSpeed's updates, with what goes with them on the host.
        slowdown: by which share of a collective's time computing beside it takes longer.
    """

    matmul_flops: float = 200e12
    host_share: float = 0.3
    zero_2_share: float = 0.3
    zero_3_share: float = 0.3
    slowdown: float = 0.0


@dataclass(frozen=True)
class ElixirMachine:
    """A machine of the paper.

    Attributes:
        name: for people.
        device_bytes: memory that CUDA reports of one GPU.
        host_bytes: memory of the host.
        memory_bytes_per_s: rate of the GPU's own memory, from its data sheet.
        rates: line of the table by number of GPUs.
        shared_link: collectives of 4 GPUs go over the links to the host.
        constants: what is fitted.
    """

    name: str
    device_bytes: int
    host_bytes: int
    memory_bytes_per_s: float
    rates: Mapping[int, Rates]
    shared_link: bool = False
    constants: Constants = field(default_factory=Constants)

    @property
    def node_ranks(self) -> int:
        """Return how many GPUs a node has."""
        return max(self.rates)

    def with_ranks(self, ranks: int) -> ParallelMachine:
        """Describe it with a number of GPUs."""
        inside = min(ranks, self.node_ranks)
        rates = self.rates[max(n for n in self.rates if n <= inside)]
        nodes = -(-ranks // self.node_ranks)
        between = rates.between * GB / max(1, inside - 1)
        if nodes > 1:
            between = min(between, NETWORK_BYTES_PER_S)
        return ParallelMachine(
            name=f"{ranks} × {self.name}",
            ranks=ranks,
            device_bytes=int(USABLE * self.device_bytes),
            host_bytes=nodes * self.host_bytes,
            collective_bytes_per_s=between or 1.0,
            collective_latency_s=LATENCY_S,
            reload_bytes_per_s=nodes * rates.reload * GB,
            offload_bytes_per_s=nodes * rates.offload * GB,
            duplex_bytes_per_s=nodes * (rates.reload + rates.offload) * GB,
            device_updates_per_s=nodes * rates.device_update * GB,
            host_updates_per_s=nodes * rates.host_update * GB,
            collectives_share_link=self.shared_link and inside > 2,
            collective_slowdown=self.constants.slowdown,
        )


DEVELOPMENT_SERVER = {
    1: Rates(0, 22, 16, 50, 5),
    2: Rates(201, 50, 40, 100, 6.5),
    4: Rates(58, 70, 60, 200, 7.5),
}
"""Table 4."""

AWS = {
    1: Rates(0, 12, 13, 44, 3.7),
    2: Rates(188, 12, 13, 86, 5.6),
    4: Rates(214, 25, 26, 171, 5),
}
"""Table 5; no published cell was measured there."""

NSCC = {
    1: Rates(0, 22, 16, 50, 5),
    2: Rates(200, 50, 40, 100, 6.5),
    4: Rates(3 * 200, 70, 60, 200, 7.5),
}
"""Like Table 4, "with the exception that the 4 GPUs are linked by high-bandwidth NVLINK, reaching 200GB/s" each."""

SXM = ElixirMachine(
    "A100 40GB SXM",
    39 * GIB + 600 * (1 << 20),
    500 * GIB,
    1555 * GB,
    NSCC,
    constants=Constants(185e12, 0.36, 0.29, 0.23),
)
PCIE = ElixirMachine(
    "A100 80GB PCIe",
    79 * GIB + 150 * (1 << 20),
    400 * GIB,
    1935 * GB,
    DEVELOPMENT_SERVER,
    True,
    Constants(164e12, 0.39, 0.47, 0.15, 0.05),
)
P4D = ElixirMachine("AWS p4d", SXM.device_bytes, 1152 * GIB, 1555 * GB, AWS, constants=SXM.constants)
"""The machine of Table 5, four of its GPUs, with the constants of the other one that has such GPUs."""

MACHINES = {m.name: m for m in (SXM, PCIE)}
"""The machines of Tables 7 and 8 by name."""
