"""These tests start where only what a machine that trains needs is installed, and pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
from importlib.util import find_spec
from tests.benchmarks.gpu import alone
alone.NEEDED += ("pytest", "numpy")
more = {name for name in ("hypothesis", "pulp", "polars", "dvc") if find_spec(name) is not None}
assert more and more <= alone.hide()
sys.argv = ["pytest", *sys.argv[1:]]
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(find_spec("hypothesis") is None, reason="little is installed here")
def test_all_of_them_are_found() -> None:
    """With a root of their own: what lies above them needs more."""
    words = [sys.executable, "-c", PROGRAM, "tests/gpu", "--collect-only", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = {line.partition("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}
    assert files == {path.name for path in Path(__file__).parent.glob("test_*.py")}
