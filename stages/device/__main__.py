"""Measures this machine and makes it the target: `python -m stowage.stages.device [cpu|cuda] [--ranks N]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from stowage.stages.device import device_of
from stowage.stages.device.rates.collectives import measure_ranks
from stowage.stages.device.rates.shares import shares_of_processes, with_shares
from stowage.stages.ir.command import Parser
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.table import read_record, write_record

TARGET = Path("artifacts/device.json")
STORES = ".stowage"


def main() -> int:
    """Write the target's description, unless it already describes this device."""
    parser = Parser(__doc__)
    parser.add_argument("kind", nargs="?", default="cpu", choices=("cpu", "cuda"), help="of this machine's devices")
    parser.add_argument("--ranks", type=int, default=1, help="processes that will train together: time what they send")
    given = parser.parse_args()
    kind: str = given.kind
    if given.ranks < 1:
        parser.error(f"--ranks is {given.ranks}: give the number of processes")
    try:
        known = _known(device_of(kind).fingerprint())
        if known is not None and known.knows(given.ranks):
            print(f"{TARGET} already describes this device; delete it to measure again.")
            return 0
        description = known or device_of(kind).describe(STORES)
        if given.ranks > 1:
            rates = measure_ranks(kind, given.ranks)
            description = replace(
                description,
                collective_bytes_per_s=rates.bytes_per_s,
                collective_s=rates.start_s,
                collective_ranks=given.ranks,
            )
            description = with_shares(description, *shares_of_processes(kind, given.ranks, STORES))
        write_record(TARGET, description)
    except StowageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    among = ""
    if given.ranks > 1:
        among = f", {description.collective_bytes_per_s / 1e9:.2f} GB/s among {given.ranks} ranks"
    print(f"{TARGET}: {description.name}, {description.flops_per_s / 1e9:.0f} GFLOP/s{among}")
    return 0


def _known(fingerprint: str) -> DeviceDescription | None:
    """Return the description that is there, if it is of this device."""
    try:
        found = read_record(TARGET, DeviceDescription)
    except StowageError:
        return None
    return found if found.fingerprint == fingerprint else None


if __name__ == "__main__":
    sys.exit(main())
