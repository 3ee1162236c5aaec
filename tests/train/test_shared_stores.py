"""One store for two users, and for two versions of this project: right numbers, or one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stowage.stages.ir import table

NOBODY = 65534
SCRIPT = """
import json, os, sys, tempfile
home, user, mask = sys.argv[1], int(sys.argv[2]), int(sys.argv[3], 8)
import torch
from torch import nn
from stowage.flows import fit
from stowage.stages.ir.errors import StowageError


def train(home):
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    batches = [torch.randn(200, 32) for _ in range(3)]
    square = lambda outputs, batch: outputs.pow(2).mean()
    step = fit(model, batches[0], lambda p: torch.optim.AdamW(p, lr=1e-2), device_budget="80%", loss=square,
               cache_dir=home, quick=True, say=lambda text: None)
    torch.manual_seed(1)
    return [float(step(batch)) for batch in batches]


if user:  # another user may not be able to read this Python's files: everything is imported before
    with tempfile.TemporaryDirectory() as warm:
        train(warm)
    os.setgid(user)
    os.setuid(user)
os.umask(mask)
try:
    print(json.dumps(train(home)))
except StowageError as error:
    print("error:", error)
    sys.exit(1)
"""
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becomes another user")


def train(home: Path, user: int = 0, mask: str = "022") -> str:
    """Losses of a few steps, or a sentence; never a traceback."""
    command = [sys.executable, "-c", SCRIPT, str(home), str(user), mask]
    environment = {**os.environ, "HOME": str(home.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def losses(said: str) -> list[float]:
    assert not said.startswith("error"), said
    found: list[float] = json.loads(said)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that every user reaches."""
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    return shared


@as_root
def test_two_users_of_one_store(home: Path) -> None:
    home.chmod(0o777)
    expected = losses(train(home, mask="000"))
    assert losses(train(home, NOBODY, "000")) == expected, "both may write"
    for path in home.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    home.chmod(0o755)
    said = train(home, NOBODY)
    assert said.startswith("error: ") or losses(said) == expected, "one may read"
    if said.startswith("error: "):
        assert "cannot be written" in said
        assert "free" in said
    for path in home.rglob("*.parquet"):
        path.chmod(0o600)
    said = train(home, NOBODY)
    assert said.startswith("error: ")
    assert "cannot be" in said
    assert "damaged" not in said, "of good files"
    assert losses(train(home)) == expected, "and nothing of the first user's was lost"


def test_two_versions_of_one_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version has left is neither taken for ours nor lost."""
    expected = losses(train(home))
    theirs = {}
    for path in list(home.rglob("*.parquet")):
        other = path.with_name(path.name.replace(f".{table.FORMAT_VERSION}.", ".0."))
        if other != path:
            other.write_bytes(b"of another version")
            theirs[other] = other.read_bytes()
    assert theirs
    assert losses(train(home)) == expected
    assert {path: path.read_bytes() for path in theirs} == theirs
