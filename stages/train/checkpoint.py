"""Checkpoints as safetensors: parameters, buffers, optimizer states, random state; written beside and renamed.

Tensors are written and read one after the other, from wherever they live: a training state larger than memory is saved
and resumed within the device budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError, PlanMismatchError, TableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.runtime.contents import Contents
from stowage.stages.runtime.tensor_file import TensorFile, write_tensors

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Resumed:
    """Where a run continues: the next iteration, and the records of those before it."""

    iteration: int
    records: list[StepRecord]


@dataclass(frozen=True)
class _State:
    """A state of a parameter that is read after the optimizer has loaded the rest: position, key, name in the file."""

    position: int
    key: str
    name: str


def _pack(item: Any, prefix: str, tensors: Tensors) -> Any:
    """Replace tensors in nested containers by references, so that the rest is JSON.

    Raises:
        ParameterError: it holds an object that is neither.
    """
    if isinstance(item, torch.Tensor):
        tensors[prefix] = item
        return {"tensor": prefix}
    if isinstance(item, dict):
        return {"dict": [[k, _pack(v, f"{prefix}/{k}", tensors)] for k, v in item.items()]}
    for kind in (list, tuple):  # and what derives from them
        if isinstance(item, kind):
            return {kind.__name__: [_pack(v, f"{prefix}/{i}", tensors) for i, v in enumerate(item)]}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise ParameterError(
        f"A checkpoint holds tensors, numbers, strings, lists and dictionaries, but {prefix.replace('/', ' → ')} is a "
        f"{type(item).__name__}: save the model alone (`save_model`), or keep that state in an optimizer that gives "
        "plain values in its `state_dict()`."
    )


def _unpack(item: Any, read: Callable[[str], torch.Tensor]) -> Any:
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "tensor":
        return read(content)
    if kind == "dict":
        return {tuple(k) if isinstance(k, list) else k: _unpack(v, read) for k, v in content}
    return {"list": list, "tuple": tuple}[kind](_unpack(v, read) for v in content)


def _states(packed: Any, file: TensorFile) -> Iterator[_State]:
    """States of parameters that are more than one number."""
    for name, states in packed["dict"]:
        if name == "state":
            for position, values in states["dict"]:
                for key, value in values["dict"]:
                    if isinstance(value, dict) and "tensor" in value and file.forms[value["tensor"]].dim():
                        yield _State(position, key, value["tensor"])


def model_tensors(model: nn.Module) -> Tensors:
    """Distinct parameters and buffers by name, as they stand in the model: what is offloaded is not in them."""
    return {f"model/{n}": t for n, t in [*model.named_parameters(), *model.named_buffers()]}


def random_states() -> Tensors:
    """Of the global generators."""
    found = {"random": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["random_cuda"] = torch.cuda.get_rng_state()
    return found


def save_checkpoint(
    path: Path, run: str, iteration: int, contents: Contents, scheduler: Any, records: list[StepRecord]
) -> None:
    """Write everything that continues the run at `iteration`; `run` names what it belongs to."""
    contents.settle()
    tensors = model_tensors(contents.model) | random_states()
    rest = {
        "optimizer": _pack(contents.optimizer_state(), "optimizer", tensors)
        if contents.optimizer is not None
        else None,
        "scheduler": _pack(scheduler.state_dict(), "scheduler", tensors) if scheduler is not None else None,
        "records": [asdict(r) for r in records],
    }
    metadata = {"run": run, "iteration": str(iteration), "rest": json.dumps(rest)}
    write_tensors(path, contents.entries(tensors.items()), metadata)


def saved_iteration(path: Path) -> int | None:
    """Where a checkpoint goes on; None where there is none that says so."""
    if not path.is_file():
        return None
    try:
        return int(TensorFile(path, hint="").metadata["iteration"])
    except (TableError, KeyError, ValueError):
        return None


def save_optimizer(path: Path, contents: Contents) -> None:
    """Write the optimizer's `state_dict`; `load_optimizer` reads it."""
    contents.settle()
    tensors: Tensors = {}
    _required(contents)
    packed = _pack(contents.optimizer_state(), "optimizer", tensors)
    write_tensors(path, contents.entries(tensors.items()), {"optimizer": json.dumps(packed)})


def load_optimizer(path: Path, contents: Contents) -> None:
    """Replace states and groups by those of a file.

    Raises:
        TableError: the file is damaged, or of something else.
    """
    file = TensorFile(path, hint="save it again, or give another file")
    if "optimizer" not in file.metadata:
        raise TableError(f"{path} holds no optimizer's state: give a file that save_optimizer wrote.")
    _load_optimizer(contents, _required(contents), json.loads(file.metadata["optimizer"]), file)


def _required(contents: Contents) -> torch.optim.Optimizer:
    if contents.optimizer is None:
        raise PlanMismatchError("There is no optimizer whose states could be saved or loaded.")
    return contents.optimizer


def load_checkpoint(path: Path, run: str, contents: Contents, scheduler: Any) -> Resumed | None:
    """Continue from `path`, or None if there is no checkpoint.

    Raises:
        TableError: the file is damaged.
        PlanMismatchError: it belongs to another run.
    """
    if not path.exists():
        return None
    file = TensorFile(path, hint="delete it to start the run again")
    try:
        rest = json.loads(file.metadata["rest"])
        iteration = int(file.metadata["iteration"])
        owner = file.metadata["run"]
    except (KeyError, ValueError) as error:
        raise TableError(f"The checkpoint {path} is damaged: delete it to start the run again.") from error
    if owner != run:
        raise PlanMismatchError(f"The checkpoint {path} belongs to another run: delete it to start this one.")
    targets = model_tensors(contents.model)
    forms = {name: (t.dtype, t.shape) for name, t in file.forms.items() if name.startswith("model/")}
    if forms != {name: (t.dtype, t.shape) for name, t in targets.items()}:
        raise PlanMismatchError(f"The checkpoint {path} belongs to another model: delete it to start this run.")
    for name, target in targets.items():
        contents.replace(target, file, name)
    if contents.optimizer is not None:
        _load_optimizer(contents, contents.optimizer, rest["optimizer"], file)
    if scheduler is not None:
        scheduler.load_state_dict(_unpack(rest["scheduler"], file.get))
    torch.set_rng_state(file.get("random"))
    if "random_cuda" in file.forms and torch.cuda.is_available():
        torch.cuda.set_rng_state(file.get("random_cuda"))
    return Resumed(iteration, [StepRecord(**r) for r in rest["records"]])


def _load_optimizer(contents: Contents, optimizer: torch.optim.Optimizer, packed: Any, file: TensorFile) -> None:
    """The optimizer loads groups and single numbers; states that are more than that come after, one at a time."""
    late = list(_states(packed, file))
    names = {s.name for s in late}

    def read(name: str) -> torch.Tensor:
        return torch.zeros((), dtype=file.forms[name].dtype) if name in names else file.get(name)

    contents.forget_states()
    optimizer.load_state_dict(_unpack(packed, read))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for state in late:
        contents.new_state(parameters[state.position], state.key, file, state.name)
