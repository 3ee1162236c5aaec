"""`accelerate launch` and torchrun really start processes, in which a Trainer and a loop train as under DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import some

pytest.importorskip("accelerate", reason="accelerate is not installed")

ROOT = Path(__file__).parents[2]
LIMIT_S = 400

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--main_process_port", "0"),
)
"""Its `--cpu` starts one process only, and the other ways several, with gloo where there are no cards."""


def launched(launcher: Sequence[str], what: str, stores: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Return what each of two ranks has found."""
    folder.mkdir()
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(folder / "no configuration")}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "tests.sharding.launched", what, str(stores), str(folder), *more],
        cwd=ROOT,
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("what", "kind"),
    some(
        [
            ("loop", ["--multi_gpu"]),
            ("stow", ["--multi_gpu"]),
            ("trainer", ["--multi_gpu"]),
            ("trainer", ["--use_fsdp", "--fsdp_version", "2"]),
        ],
        keep=[("stow", ["--multi_gpu"])],
    ),
)
def test_accelerate_launch_gives_the_numbers_of_torchrun_and_ddp(
    what: str, kind: list[str], fit_stores: Path, tmp_path: Path
) -> None:
    alone = ["alone"] if "--use_fsdp" in kind else []  # without `shard` the Trainer would use FSDP there
    found = launched([*ACCELERATE, *kind], what, fit_stores, tmp_path / "accelerate", *alone)
    # What `stow` does without a launcher is compared in `test_stowed_trainer`, and takes long.
    expected = found if what == "stow" else launched(TORCHRUN, what, fit_stores, tmp_path / "torchrun")
    for one, other in zip(found, expected, strict=True):
        assert one["ranks"] == other["ranks"] == 2
        assert len(one["ours"]["losses"]) >= 4
        assert len(set(one["ours"]["losses"])) > 1
        for name in ("losses", *(("sums",) if what != "stow" else ())):
            assert one["ours"][name] == other["ours"][name] == other["ddp"][name]
            assert alone or one["ddp"][name] == other["ddp"][name]
        assert what != "stow" or one["ours"]["gathers"]
        assert what != "trainer" or one["ours"]["wrapped"].startswith("FSDP")
