"""Results of `profile`: costs of distinct calls and rates of a device."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

MOST = 1e18
"""The upper limit for bytes, and for rates per second, of one device: more is refused as damaged."""


@dataclass(frozen=True)
class Cost:
    """Cost of one distinct call on one device.

    Attributes:
        signature: the signature of the call (`Call.signature`).
        device: fingerprint of the device.
        time_s: mean time, seconds.
        output_bytes: bytes of storages it creates.
        workspace_bytes: peak bytes above inputs and outputs, from the allocator's events.
        samples: number of timed executions; 0 for an estimate.
        source: `measured`; `roofline` when estimated from bytes, flops and the device's rates; `similar` when taken
            from other sizes of the same operator (see `profile.similar`), which no store keeps.
        flagged_bytes: `workspace_bytes` by its flags (see `ir.flags`), where it has some and they were tried.
        copied_bytes: the part of `workspace_bytes` that is copies of weights which one update of all changes.
    """

    signature: str
    device: str
    time_s: float
    output_bytes: int
    workspace_bytes: int
    samples: int
    source: Literal["measured", "roofline", "similar"]
    flagged_bytes: tuple[int, ...] = ()
    copied_bytes: int = 0

    def is_possible(self) -> bool:
        """Say whether no number is negative or infinite."""
        nbytes = (self.output_bytes, self.workspace_bytes, *self.flagged_bytes, self.copied_bytes)
        return 0 <= self.time_s < math.inf and min(nbytes) >= 0

    def is_measured(self, samples: int = 1) -> bool:
        """Say whether the cost was measured, with at least `samples` timed executions."""
        return self.source == "measured" and self.samples >= samples


@dataclass(frozen=True)
class Returned:
    """The tensors that one distinct call returns on one device.

    Attributes:
        signature: the signature of the call (`Call.signature`).
        outputs: one for each output, "" where it is no tensor: type, shape, strides, offset, bytes of its storage, and
            the positions of the argument and of the earlier output whose storage it shares, -1 for none.
    """

    signature: str
    outputs: tuple[str, ...]


ROUNDING_BYTES = 512
"""Unit to which PyTorch's allocator on a GPU rounds up each allocation."""

FRAGMENTS = 0.02
"""Share of a budget that a GPU's allocator keeps in unusable fragments.

With expandable segments these are the rests of pages; the share has not been measured yet.
"""


STAND_IN_BYTES = 128
"""Bytes that a budget leaves to what stands for sharded parameters: it is released before a step takes any memory."""


_SHARE = "share_"
"""What a field's name begins with that is a rank's share of another field's rate."""


@dataclass(frozen=True)
class DeviceDescription:
    """A device and its rates; `artifacts/device.json` names the target.

    Attributes:
        fingerprint: hash of what identifies it.
        name: for people.
        type: `cpu` or `cuda`.
        memory_bytes: size of the device tier.
        flops_per_s: rate of a large float32 matrix product.
        memory_copy_bytes_per_s: read + write inside the device tier.
        disk_read_bytes_per_s, disk_write_bytes_per_s: one at a time.
        disk_duplex_bytes_per_s: both directions at once, summed.
        update_bytes_per_s: bytes that an AdamW update reads and writes per second.
        dispatch_s: time of a call that does no work.
        offload_bytes_per_s, reload_bytes_per_s: to and from pinned host memory, one at a time; 0 without a host tier.
        duplex_bytes_per_s: both at once, summed.
        cpu_update_bytes_per_s: bytes that an AdamW update in host memory reads and writes per second, beside copies; 0
            where the CPU is the device itself.
        library_bytes: device bytes that libraries such as cuBLAS keep from the allocator.
        context_bytes: device bytes in use outside the allocator when it was measured; a budget does not count them.
        collective_bytes_per_s: bytes that a rank receives per second in a gather among the ranks of this run; 0 where
            there is one rank.
        collective_s: time of a collective of next to no bytes.
        collective_ranks: the number of ranks that these were measured among.
        collectives_share_link: collectives pass over the link that copies to and from the host use: beside such copies
            they take longer. False where there is one rank.
        share_offload_bytes_per_s, share_reload_bytes_per_s, share_duplex_bytes_per_s, share_cpu_update_bytes_per_s,
            share_disk_read_bytes_per_s, share_disk_write_bytes_per_s, share_disk_duplex_bytes_per_s: the rates of these
            names that each of the ranks has while all of them do the same; 0 where that was not measured.
    """

    fingerprint: str
    name: str
    type: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_s: float
    memory_copy_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_duplex_bytes_per_s: float
    update_bytes_per_s: float
    dispatch_s: float
    offload_bytes_per_s: float = 0.0
    reload_bytes_per_s: float = 0.0
    duplex_bytes_per_s: float = 0.0
    cpu_update_bytes_per_s: float = 0.0
    library_bytes: int = 0
    context_bytes: int = 0
    collective_bytes_per_s: float = 0.0
    collective_s: float = 0.0
    collective_ranks: int = 0
    collectives_share_link: bool = False
    share_offload_bytes_per_s: float = 0.0
    share_reload_bytes_per_s: float = 0.0
    share_duplex_bytes_per_s: float = 0.0
    share_cpu_update_bytes_per_s: float = 0.0
    share_disk_read_bytes_per_s: float = 0.0
    share_disk_write_bytes_per_s: float = 0.0
    share_disk_duplex_bytes_per_s: float = 0.0

    def among(self, ranks: int) -> DeviceDescription:
        """Return the description as a step on so many ranks sees it.

        A single rank has no collectives; each of several has its share of what all of them use.
        """
        shares = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith(_SHARE)}
        if ranks > 1:
            known = {name.removeprefix(_SHARE): share for name, share in shares.items() if share}
            return replace(self, **known) if known else self
        if not self.collective_bytes_per_s and not self.collectives_share_link and not any(shares.values()):
            return self
        alone = replace(self, collective_bytes_per_s=0.0, collective_s=0.0, collective_ranks=0)
        nothing: dict[str, Any] = dict.fromkeys(shares, 0.0)
        return replace(alone, collectives_share_link=False, **nothing)

    def knows(self, ranks: int) -> bool:
        """Return whether everything was measured that plans for so many ranks need, their shares included."""
        return ranks == 1 or (self.collective_ranks == ranks and self.share_disk_read_bytes_per_s > 0)

    def reserve_bytes(self, budget_bytes: int, storages: int) -> int:
        """Return the bytes of a budget that a plan must leave to the device's allocator.

        On a GPU these are the workspaces of libraries, what rounding adds to each storage, and a share for fragments
        between tensors that are too small to use. Where parameters are sharded, their stand-ins need a few bytes.

        Args:
            budget_bytes: the device budget.
            storages: number of storages that the program has.
        """
        sharding = STAND_IN_BYTES if self.collective_bytes_per_s else 0
        if self.type == "cpu" or not self.library_bytes:  # a CPU counts every byte; without a measurement assume 0
            return sharding
        return sharding + self.library_bytes + ROUNDING_BYTES * storages + int(FRAGMENTS * budget_bytes)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no device has."""
        if re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,120}", self.fingerprint, re.ASCII) is None:
            raise ValueError(f"fingerprint is {self.fingerprint!r}, which is none")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("fingerprint", "name", "type"):
                continue
            if not (0 < value < MOST or (value == 0 and field.default == 0.0)):
                raise ValueError(f"{field.name} is {value!r}, which no device has")
