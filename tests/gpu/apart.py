"""Tests in a process of their own: where a kernel goes wrong, and ends the process or leaves its context dead, one test
fails and not all that come after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSIDE = "STOWAGE_TEST_APART"
"""Set in such a process."""


def run_apart(file: Path, name: str, environment: dict[str, str]) -> str:
    """Run one test, `name` in `file`, with more in its environment; empty, or what became of it."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    words = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "pytest",
        f"{file}::{name}",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, INSIDE: "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return f"status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-4000:]}" if done.returncode else ""
