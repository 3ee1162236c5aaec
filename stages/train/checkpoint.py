"""Writes checkpoints as safetensors: parameters, buffers, optimizer states, random state; first beside, then renamed.

Tensors are written and read one after the other, from wherever they are: a training state larger than memory is saved
and resumed within the device budget. `restore` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.files.folder import INDEX
from stowage.stages.runtime.files.source import TensorSource
from stowage.stages.runtime.files.tensor_file import TensorFile
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.packing import Tensors, pack

CHECKPOINT, OPTIMIZER, MODEL = "checkpoint", "optimizer", "model"


def kind_of(file: TensorSource) -> str:
    """Return what a file was written by: `save`, `save_optimizer`, or anything that writes weights."""
    if "rest" in file.metadata:
        return CHECKPOINT
    return OPTIMIZER if "optimizer" in file.metadata else MODEL


def class_name(item: Any) -> str:
    """Return the class name of an optimizer or a schedule; "" for None."""
    return f"{type(item).__module__}.{type(item).__qualname__}" if item is not None else ""


def model_tensors(model: nn.Module) -> Tensors:
    """Return distinct parameters and buffers by name, as they are in the model: stand-ins for what is offloaded."""
    return {f"model/{n}": t for n, t in [*model.named_parameters(), *model.named_buffers()]}


def random_states() -> Tensors:
    """Return the states of the global generators."""
    found = {"random": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["random_cuda"] = torch.cuda.get_rng_state()
    return found


def save_checkpoint(
    path: Path,
    run: str,
    iteration: int,
    contents: Contents,
    scheduler: Any,
    records: list[StepRecord],
    frozen: Mapping[str, Any] | None = None,
) -> None:
    """Write everything that continues the run at `iteration`; `run` names what it belongs to.

    `frozen` is the state of what chooses the units that train in each step, where something is frozen.
    """
    contents.settle()
    tensors = model_tensors(contents.model)
    optimizer = contents.optimizer
    rest = {
        "optimizer": pack(contents.optimizer_state(), "optimizer", tensors) if optimizer is not None else None,
        "scheduler": pack(scheduler.state_dict(), "scheduler", tensors) if scheduler is not None else None,
        "records": [asdict(r) for r in records],
        "classes": [class_name(optimizer), class_name(scheduler)],
    }
    if frozen is not None:
        rest["frozen"] = dict(frozen)
    metadata = {"run": run, "iteration": str(iteration), "rest": json.dumps(rest)}
    contents.write_checkpoint(path, tensors, random_states(), metadata)


def saved_iteration(path: Path) -> int | None:
    """Return the iteration at which a checkpoint goes on; None if there is no checkpoint that says so."""
    file = path / INDEX if path.is_dir() else path
    if not file.is_file():
        return None
    try:
        return int(TensorFile(file, hint="").metadata["iteration"])
    except (TableError, KeyError, ValueError):
        return None


def save_optimizer(path: Path, contents: Contents) -> None:
    """Write the optimizer's `state_dict`; `load_optimizer` reads it."""
    contents.settle()
    tensors: Tensors = {}
    optimizer = required(contents)
    packed = pack(contents.optimizer_state(), "optimizer", tensors)
    metadata = {"optimizer": json.dumps(packed), "class": class_name(optimizer)}
    contents.write(path, contents.entries(tensors.items()), metadata)


def required(contents: Contents) -> torch.optim.Optimizer:
    """Return the optimizer.

    Raises:
        PlanMismatchError: there is none.
    """
    if contents.optimizer is None:
        raise PlanMismatchError("There is no optimizer whose states could be saved or loaded.")
    return contents.optimizer
