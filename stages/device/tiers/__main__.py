"""Prints rates of the disk tier in a folder: `python -m stowage.stages.device.tiers [folder] [chunk MiB] [threads]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from stowage.stages.device.tiers.disk import DiskTier
from stowage.stages.device.tiers.disk_file import PAGE
from stowage.stages.device.tiers.rates import measure_tier
from stowage.stages.ir.command import Parser
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.machine import DISK_CHUNK_BYTES, DISK_THREADS

TENSORS, TENSOR_BYTES = 16, 24 << 20


def _tensors(aligned: bool) -> list[torch.Tensor]:
    """Return float tensors that start at a page, or 64 bytes after one, as torch's allocator makes them."""
    made = []
    for _ in range(TENSORS):
        memory = torch.randint(256, (TENSOR_BYTES + 2 * PAGE,), dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGE + (0 if aligned else 64)
        made.append(memory[start : start + TENSOR_BYTES].view(torch.float32))
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Print a table of rates."""
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", default=".stowage", help="on the disk to measure")
    parser.add_argument("chunk", nargs="?", type=int, default=DISK_CHUNK_BYTES >> 20, help="MiB of one transfer")
    parser.add_argument("threads", nargs="?", type=int, default=DISK_THREADS, help="each way")
    given = parser.parse_args(words)
    folder, chunk, threads = given.folder, given.chunk << 20, given.threads
    a, b = torch.randn(2, 768, 768, device="cpu")
    try:
        tier = DiskTier(folder, chunk_bytes=chunk, threads=threads)
    except StowageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{tier.note or 'direct I/O'}; chunks of {chunk >> 20} MiB, {threads} threads each way")
    print(f"{'tensors':12}{'beside':16}{'':8}{'MB/s':>8}{'CPU s/GB':>10}{'compute':>9}")
    for layout, tensors in (("64 bytes", _tensors(False)), ("pages", _tensors(True))):
        for beside, compute in (("nothing", None), ("matrix products", lambda: a @ b)):
            for rate in measure_tier(tier, tensors, compute=compute):
                print(
                    f"{layout:12}{beside:16}{rate.what:8}{rate.bytes_per_s / 1e6:8.0f}{rate.cpu_s_per_gb:10.2f}"
                    f"{rate.compute_slowdown:8.2f}x"
                )
    tier.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
