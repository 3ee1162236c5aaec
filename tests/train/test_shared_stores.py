"""One store for two users, and for two versions of this project: right numbers, or one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from stowage.stages.ir import table
from stowage.stages.ir.table import write_record
from tests.devices import made_up_cpu
from tests.permissions import let_others_in

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from stowage.flows import fit
from stowage.stages.ir.errors import StowageError

NOBODY = 65534


def train(stores):
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    batches = [torch.randn(200, 32) for _ in range(3)]
    square = lambda outputs, batch: outputs.pow(2).mean()
    step = fit(model, batches[0], lambda p: torch.optim.AdamW(p, lr=1e-2), device_budget="80%", loss=square,
               cache_dir=stores, quick=True, say=lambda text: None)
    torch.manual_seed(1)
    return [float(step(batch)) for batch in batches]


def attempt(stores, user=0, mask=0o022):
    # In a process of its own, which has imported everything: another user may not be able to read this Python's files.
    read, write = os.pipe()
    if os.fork() == 0:
        if user:
            os.setgid(user)
            os.setuid(user)
        os.umask(mask)
        try:
            said = train(stores)
        except StowageError as error:
            said = f"error: {error}"
        except BaseException as error:
            said = f"Traceback: {error!r}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return json.load(answer)


def modes(stores, folders, files):
    for path in (stores, *stores.rglob("*")):
        path.chmod(folders if path.is_dir() else files)


stores, warm = Path(sys.argv[1]), sys.argv[2]
found = {"warm": train(warm)}
"""
USERS = """
modes(stores, 0o777, 0o666)
found["first"] = attempt(stores, mask=0)
found["both may write"] = attempt(stores, NOBODY, 0)
modes(stores, 0o755, 0o644)
found["one may read"] = attempt(stores, NOBODY)
modes(stores, 0o755, 0o600)
found["one may not read"] = attempt(stores, NOBODY)
found["first again"] = attempt(stores)
"""
VERSIONS = f"""
found["first"] = attempt(stores)
theirs = {{}}
for path in list(stores.rglob("*.parquet")):
    other = path.with_name(path.name.replace(".{table.FORMAT_VERSION}.", ".0."))
    if other != path:
        other.write_bytes(b"of another version")
        theirs[other] = other.read_bytes()
found["number"] = len(theirs)
found["again"] = attempt(stores)
found["kept"] = theirs == {{path: path.read_bytes() for path in theirs}}
"""
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What becomes of both, with a store that knows the device."""
    folder = tmp_path_factory.mktemp("sharing")
    let_others_in(folder)
    target = made_up_cpu()
    for name in ("shared", "warm"):
        write_record(folder / name / "devices" / f"{target.fingerprint}.json", target)
    script = SCRIPT + VERSIONS + (USERS if AS_ROOT else "") + "print(json.dumps(found))"
    command = [sys.executable, "-c", script, str(folder / "shared"), str(folder / "warm")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(device_threads())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(folder / "shared")
    assert done.returncode == 0, done.stderr
    ended: dict[str, object] = json.loads(done.stdout)
    return ended


def device_threads() -> int:
    """Part of the device's fingerprint."""
    import torch

    return torch.get_num_threads()


@pytest.mark.skipif(not AS_ROOT, reason="becomes another user")
def test_two_users_of_one_store(found: dict[str, object]) -> None:
    expected = found["warm"]
    assert isinstance(expected, list)
    assert found["first"] == found["both may write"] == found["first again"] == expected
    for case, said in (("one may read", "cannot be written"), ("one may not read", "cannot be ")):
        text = str(found[case])
        assert text.startswith("error: "), text
        assert said in text
        assert "damaged" not in text, "of good files"
    assert "free" in str(found["one may read"])


def test_two_versions_of_one_store(found: dict[str, object]) -> None:
    """What another version has left is neither taken for ours nor lost."""
    assert found["number"]
    assert found["first"] == found["again"] == found["warm"]
    assert found["kept"]
