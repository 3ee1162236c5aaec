"""Small projects that are planned and trained once, and copied for every case."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_rows
from tests.torture import forks

PLANNING = ("trace", "profile", "partition", "options", "solve", "codegen")
STAGES = (*PLANNING, "train")
PRODUCTS = {"trace": "trace", "profile": "profile", "partition": "partition", "options": "options", "solve": "solve"}
TEXT = "the quick brown fox jumps over the lazy dog; " * 60
PARAMETERS: dict[str, Any] = {
    "trace": {
        "model": {
            "architecture": "gpt2",
            "overrides": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 256},
        },
        "batch_size": 2,
        "sequence_length": 16,
        "loss": None,
        "optimizer": {"name": "AdamW", "arguments": {"lr": 1.0e-2, "weight_decay": 0.01}},
        "seed": 0,
        "device": "cpu",
    },
    "profile": {"costs": "measured", "seconds_per_call": 0.001, "min_samples": 1},
    "partition": {"max_blocks": 30, "cluster_size": 20, "top_size": 30, "alpha": 0.5},
    "options": {
        "peak_budgets": 2,
        "save_budgets": 2,
        "time_limit_s": 1.0,
        "seed": 0,
        "workers": 1,
        "max_exact_nodes": 0,
        "formulation": "retention",
    },
    "solve": {"device_budget": "90%", "method": "auto", "memory_slots": 50, "offload_dir": None, "disk_budget": None},
    "train": {
        "steps": 4,
        "checkpoint_every": 1,
        "seed": 0,
        "schedule": {"name": "CosineAnnealingLR", "arguments": {"T_max": 60}},
        "data": {"source": "text.txt", "column": None, "tokenizer": None},
        "compare_eager": True,
        "measure_every": 0,
    },
}
MODEL = """
import torch
from torch import nn
from helper import activation


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return nn.functional.dropout(self.second(activation(self.first(x))), 0.1)


def build():
    return Model(), {"x": torch.randn(4, 8)}


def loss(outputs, batch):
    return outputs.pow(2).mean()
"""
HELPER = "import torch\n\n\ndef activation(x):\n    return torch.tanh(x)\n"


def own_model() -> dict[str, Any]:
    """Parameters of a model that is the project's own code."""
    content = copy.deepcopy(PARAMETERS)
    content["trace"] |= {"model": {"callable": "my_model:build"}, "loss": "my_model:loss"}
    content["solve"]["device_budget"] = "120%"
    return content


def offloading() -> dict[str, Any]:
    """Parameters of a model whose training state lives on the disk."""
    content = copy.deepcopy(PARAMETERS)
    content["trace"]["model"]["overrides"].update(n_layer=3, n_embd=384)
    content["profile"]["costs"] = "roofline"
    content["solve"] |= {"device_budget": "66%", "offload_dir": ".stowage/lower_tier", "disk_budget": "1GiB"}
    content["train"] |= {"steps": 3, "checkpoint_every": 1}
    return content


def stages(*names: str) -> Callable[[], None]:
    """Stages one after the other; the first that fails is the last."""

    def work() -> None:
        sys.argv = sys.argv[:1]
        sys.path.insert(0, "")
        for name in names:
            try:
                runpy.run_module(f"stowage.stages.{name}", run_name="__main__", alter_sys=True)
            except SystemExit as error:
                if error.code not in (0, None):
                    raise

    return work


@dataclass(frozen=True)
class Project:
    """One that is planned and trained.

    Attributes:
        folder: not to be changed.
        losses: of every step.
        final: the trained weights.
        took_s: each stage, undisturbed.
    """

    folder: Path
    losses: list[float]
    final: bytes
    took_s: dict[str, float]

    def copy(self, to: Path, *, without: tuple[str, ...] = ()) -> Path:
        """A copy without the products of some stages."""
        shutil.copytree(self.folder, to, symlinks=True)
        for name in without:
            shutil.rmtree(to / "artifacts" / name, ignore_errors=True)
        return to

    def same_end(self, folder: Path) -> str:
        """Empty if a project has ended like this one; else how it differs."""
        found = losses(folder)
        if found != self.losses:
            return f"losses {found} instead of {self.losses}"
        final = folder / "artifacts" / "train" / "final.safetensors"
        return "" if final.read_bytes() == self.final else "other weights at the end"


def losses(folder: Path) -> list[float]:
    """Of a project that has been trained."""
    return [r.loss for r in read_rows(folder / "artifacts" / "train" / "steps.parquet", StepRecord)]


def losses_equal(folder: Path) -> bool | None:
    """Whether they were plain PyTorch's; None where that was not asked."""
    found: bool | None = json.loads((folder / "artifacts" / "train" / "metrics.json").read_text()).get("losses_equal")
    return found


def import_what_stages_import(folder: Path, project: dict[str, Any], device: Path) -> None:
    """In this process, so that no case does it again."""
    listed = folder.with_suffix(".modules")

    def work() -> None:
        stages(*STAGES)()
        listed.write_text(json.dumps(list(sys.modules)))

    _write(folder, project, device)
    ended = forks.run(work, folder)
    if ended.code:
        raise RuntimeError(f"the undisturbed run failed: {ended.said}")
    own = {"my_model", "helper"}
    for name in json.loads(listed.read_text()):
        if name not in sys.modules and not name.endswith("__main__") and name.partition(".")[0] not in own:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def make(folder: Path, parameters: dict[str, Any], device: Path) -> Project:
    """Plan and train a project."""
    _write(folder, parameters, device)
    took: dict[str, float] = {}
    for name in STAGES:
        ended = forks.run(stages(name), folder)
        if ended.code:
            raise RuntimeError(f"the undisturbed run failed in {name}: {ended.said}")
        took[name] = ended.took_s
    if losses_equal(folder) is not True:
        raise RuntimeError("the undisturbed run has other losses than plain PyTorch")
    final = (folder / "artifacts" / "train" / "final.safetensors").read_bytes()
    return Project(folder, losses(folder), final, took)


def _write(folder: Path, parameters: dict[str, Any], device: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters, sort_keys=False))
    (folder / "text.txt").write_text(TEXT)
    (folder / "my_model.py").write_text(MODEL)
    (folder / "helper.py").write_text(HELPER)
    (folder / "artifacts").mkdir()
    shutil.copyfile(device, folder / "artifacts" / "device.json")
