"""Measures this machine and makes it the target: `python -m stowage.stages.device [cpu|cuda]`."""

from __future__ import annotations

import sys
from pathlib import Path

from stowage.stages.device import device_of
from stowage.stages.ir.command import Parser
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import StowageError
from stowage.stages.ir.table import read_record, write_record

TARGET = Path("artifacts/device.json")


def main() -> int:
    """Write the target's description, unless it already describes this device."""
    parser = Parser(__doc__)
    parser.add_argument("kind", nargs="?", default="cpu", choices=("cpu", "cuda"), help="of this machine's devices")
    kind: str = parser.parse_args().kind
    device = device_of(kind)
    try:
        if read_record(TARGET, DeviceDescription).fingerprint == device.fingerprint():
            print(f"{TARGET} already describes this device; delete it to measure again.")
            return 0
    except StowageError:
        pass
    try:
        description = device.describe(".stowage")
        write_record(TARGET, description)
    except StowageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{TARGET}: {description.name}, {description.flops_per_s / 1e9:.0f} GFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
