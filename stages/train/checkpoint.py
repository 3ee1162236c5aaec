"""Checkpoints as safetensors: parameters, buffers, optimizer states, random state; written beside and renamed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import write_atomically


@dataclass(frozen=True)
class Resumed:
    """Where a run continues: the next iteration, and the records of those before it."""

    iteration: int
    records: list[StepRecord]


def _pack(item: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Replace tensors in nested containers by references, so that the rest is JSON."""
    if isinstance(item, torch.Tensor):
        tensors[prefix] = item.detach().clone().contiguous()
        return {"tensor": prefix}
    if isinstance(item, dict):
        return {"dict": [[k, _pack(v, f"{prefix}/{k}", tensors)] for k, v in item.items()]}
    if isinstance(item, (list, tuple)):
        return {type(item).__name__: [_pack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(item)]}
    return item


def _unpack(item: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: _unpack(v, tensors) for k, v in content}
    return {"list": list, "tuple": tuple}[kind](_unpack(v, tensors) for v in content)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Distinct parameters and buffers by name."""
    return {
        **{f"model/{n}": p.detach().contiguous() for n, p in model.named_parameters()},
        **{f"model/{n}": b.detach().contiguous() for n, b in model.named_buffers()},
    }


def save_checkpoint(
    path: Path,
    run: str,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    records: list[StepRecord],
) -> None:
    """Write everything that continues the run at `iteration`; `run` names what it belongs to."""
    tensors = model_tensors(model)
    tensors["random"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random_cuda"] = torch.cuda.get_rng_state()
    rest = {
        "optimizer": _pack(optimizer.state_dict(), "optimizer", tensors) if optimizer is not None else None,
        "scheduler": _pack(scheduler.state_dict(), "scheduler", tensors) if scheduler is not None else None,
        "records": [asdict(r) for r in records],
    }
    metadata = {"run": run, "iteration": str(iteration), "rest": json.dumps(rest)}
    write_atomically(path, save(tensors, metadata))


def load_checkpoint(
    path: Path, run: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> Resumed | None:
    """Continue from `path`, or None if there is no checkpoint.

    Raises:
        TableError: the file is damaged.
        PlanMismatchError: it belongs to another run.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        rest = json.loads(metadata["rest"])
        iteration = int(metadata["iteration"])
        owner = metadata["run"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TableError(f"The checkpoint {path} is damaged: delete it to start the run again.") from error
    if owner != run:
        raise PlanMismatchError(f"The checkpoint {path} belongs to another run: delete it to start this one.")
    targets = {f"model/{name}": t for name, t in [*model.named_parameters(), *model.named_buffers()]}
    shapes = {name: (t.dtype, t.shape) for name, t in tensors.items() if name.startswith("model/")}
    if shapes != {name: (t.dtype, t.shape) for name, t in targets.items()}:
        raise PlanMismatchError(f"The checkpoint {path} belongs to another model: delete it to start this run.")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    if optimizer is not None:
        optimizer.load_state_dict(_unpack(rest["optimizer"], tensors))
    if scheduler is not None:
        scheduler.load_state_dict(_unpack(rest["scheduler"], tensors))
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random_cuda"])
    return Resumed(iteration, [StepRecord(**r) for r in rest["records"]])
