"""Lower tiers: places that tensors are offloaded to, and the transfers to and from them.

- `base`: the interface of a tier: reserve, offload, reload, wait.
- `layout`: which bytes of a tensor are transferred.
- `slots`: what is stored in which slot.
- `lanes`: worker threads that transfer chunks in order, in two streams at once.
- `disk`: one preallocated file, with direct I/O through staging buffers.
- `disk_file`: opens that file.
- `disk_mover`: transfers its chunks.
- `host`: pinned host memory behind a GPU.
- `cuda_lanes`: the GPU's streams and events for it.
- `grouping`: buffers that tensors in pinned memory share.
- `host_and_disk`: host memory and the disk behind it, for one GPU.
- `null`: transfers nothing in the background and checks the order of verbs, for tests.
- `delayed`: starts the transfers of one stream late, so that a test sees a missing wait.
- `opening`: opens the tier for a kind of device.
- `rates`: rates of a tier in use, alone and beside computing: `python -m stowage.stages.device.tiers`.
"""

from __future__ import annotations

from stowage.stages.device.tiers.base import OFFLOAD, RELOAD, HostMemory, Span, Tier, Transfer
from stowage.stages.device.tiers.delayed import DelayedTier
from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.host import PinnedTier
from stowage.stages.device.tiers.host_and_disk import HostAndDiskTier
from stowage.stages.device.tiers.null import NullTier
from stowage.stages.device.tiers.opening import open_tier

__all__ = [
    "OFFLOAD",
    "RELOAD",
    "DelayedTier",
    "DiskTier",
    "HostAndDiskTier",
    "HostMemory",
    "NullTier",
    "PinnedTier",
    "Span",
    "Tier",
    "Transfer",
    "open_tier",
]
