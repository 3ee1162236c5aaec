"""What every stage's `__main__` shares: where artifacts live, and errors as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from stowage.stages.ir.errors import StowageError

ARTIFACTS = Path("artifacts")
STORE = Path(".stowage")
DEVICE = ARTIFACTS / "device.json"


def run_stage(main: Callable[[], None]) -> None:
    """Run a stage; a `StowageError` ends the process with its sentence and exit code 1."""
    try:
        main()
    except StowageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
