"""Restores what was saved: everything is checked before anything changes."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stowage.stages.ir.errors import ParameterError, PlanMismatchError, TableError
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import record_of
from stowage.stages.runtime.files.folder import is_there
from stowage.stages.runtime.files.source import TensorSource
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.train.checkpoint import (
    CHECKPOINT,
    MODEL,
    OPTIMIZER,
    class_name,
    kind_of,
    model_tensors,
    required,
)
from stowage.stages.train.packing import unpack

HINT = "save it again, or give another file"
OWN_HINT = "delete it to start the run again"
_HOLDS = {
    CHECKPOINT: "a checkpoint, which `step.load` reads",
    OPTIMIZER: "the state of an optimizer alone, which `step.load_optimizer` reads",
    MODEL: "the weights of a model alone, which `step.load_model` reads",
}
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Resumed:
    """The point where a run continues: the next iteration, and the records of those before it."""

    iteration: int
    records: list[StepRecord]


@dataclass(frozen=True)
class _State:
    """A state of a parameter that is read after the optimizer has loaded the rest: position, key, name in the file."""

    position: int
    key: str
    name: str


def open_file(path: Path, kind: str, contents: Contents, hint: str = HINT) -> TensorSource:
    """Open a file of this kind, and read it once from end to end.

    Args:
        path: the file.
        kind: what it must be: a checkpoint, an optimizer or a model.
        contents: of what it is to be loaded into.
        hint: what to do about a file that cannot be used.

    Raises:
        ParameterError: there is none.
        TableError: it is something else, or not what was written.
    """
    if not is_there(path):
        what = {CHECKPOINT: "checkpoint", OPTIMIZER: "state of an optimizer", MODEL: "model"}[kind]
        raise ParameterError(f"There is no {what} at {path}.")
    file = contents.open(path, hint)
    if kind_of(file) != kind:
        raise TableError(f"{path} holds {_HOLDS[kind_of(file)]}: {hint}.")
    file.verify()
    return file


def load_checkpoint(
    path: Path,
    run: str,
    contents: Contents,
    scheduler: Any,
    hint: str = OWN_HINT,
    load_frozen: Callable[[Mapping[str, Any]], None] | None = None,
) -> Resumed | None:
    """Continue from `path`, or return None if there is no checkpoint; if it cannot be used, nothing is changed.

    `load_frozen` takes the state of what chooses the units that train in each step, and refuses that of another.

    Raises:
        TableError: the file is damaged, or something else.
        PlanMismatchError: it belongs to another run, model, optimizer or schedule.
    """
    if not contents.sees(path):
        return None
    undo = ExitStack()
    with undo:
        load = contents.together(lambda: _checked(path, run, contents, scheduler, hint, undo, load_frozen))
        undo.pop_all()
    return contents.together(load)


def _checked(
    path: Path,
    run: str,
    contents: Contents,
    scheduler: Any,
    hint: str,
    undo: ExitStack,
    load_frozen: Callable[[Mapping[str, Any]], None] | None,
) -> Callable[[], Resumed]:
    """Check everything, and return what loads it; `undo` takes back what has changed by then."""
    file = open_file(path, CHECKPOINT, contents, hint)
    try:
        rest = json.loads(file.metadata["rest"])
        iteration, owner = int(file.metadata["iteration"]), file.metadata["run"]
        records = [record_of(StepRecord, record) for record in rest["records"]]
        packed, schedule = rest["optimizer"], rest["scheduler"]
        optimizer_class, schedule_class = map(str, rest.get("classes", ["", ""]))
        scheduler_state = unpack(schedule, file.get) if schedule is not None else None
        _check_generators(file)
        if iteration < 0:
            raise ValueError("iterations are counted from 0")
    except (*_WRONG, RuntimeError) as error:
        raise TableError(f"{path} is damaged, or was changed after it was written ({_line(error)}): {hint}.") from error
    if owner != run:
        raise PlanMismatchError(f"{path} belongs to another run: {hint}.")
    _check_model(path, file, contents, hint)
    _check_class(path, "optimizer", optimizer_class, contents.optimizer, packed is not None, hint)
    _check_class(path, "scheduler", schedule_class, scheduler, schedule is not None, hint)
    load_optimizer_state = None
    if contents.optimizer is not None:
        load_optimizer_state = _prepared(path, contents, contents.optimizer, packed, file, hint)
    if scheduler is not None:
        undo.callback(_load_schedule(path, scheduler, scheduler_state, hint))
    _load_frozen(path, rest.get("frozen"), load_frozen, hint)

    def load() -> Resumed:
        for parameter in contents.model.parameters():
            parameter.grad = None  # records of steps that were not saved
        for name, target in model_tensors(contents.model).items():
            contents.replace(target, file, name)
        if load_optimizer_state is not None:
            load_optimizer_state()
        if "random" in file.forms:  # a rank beyond those that saved keeps the generators that it has
            torch.set_rng_state(file.get("random"))
        if "random_cuda" in file.forms and torch.cuda.is_available():
            torch.cuda.set_rng_state(file.get("random_cuda"))
        return Resumed(iteration, records)

    return load


def _load_frozen(path: Path, state: Any, load: Callable[[Mapping[str, Any]], None] | None, hint: str) -> None:
    """Hand over the state of what is frozen: last of all checks, for it changes nothing where it is refused.

    Raises:
        PlanMismatchError: the file was saved by a run that freezes and this is none, or the other way round.
        TableError: it is damaged.
    """
    if state is None and load is None:
        return
    if state is None or load is None:
        was, now = ("without", "with") if state is None else ("with", "without")
        raise PlanMismatchError(f"{path} was saved by a run {was} `freeze`, and this one is {now}: {hint}.")
    try:
        load(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path} is damaged, or was changed after it was written ({_line(error)}): {hint}.") from error


def load_optimizer(path: Path, contents: Contents) -> None:
    """Replace states and groups by those of a file.

    Raises:
        ParameterError: there is none.
        TableError: the file is damaged, or of something else.
        PlanMismatchError: it is of another optimizer.
    """

    def checked() -> Callable[[], None]:
        file = open_file(path, OPTIMIZER, contents)
        optimizer = required(contents)
        try:
            packed = json.loads(file.metadata["optimizer"])
        except ValueError as error:
            raise TableError(f"{path} is damaged, or was changed after it was written: {HINT}.") from error
        _check_class(path, "optimizer", file.metadata.get("class", ""), optimizer, True, HINT)
        return _prepared(path, contents, optimizer, packed, file, HINT)

    contents.together(contents.together(checked))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_generators(file: TensorSource) -> None:
    if "random" in file.forms:
        torch.Generator().set_state(file.get("random"))


def _check_model(path: Path, file: TensorSource, contents: Contents, hint: str) -> None:
    found = {name: (t.dtype, t.shape) for name, t in file.forms.items() if name.startswith("model/")}
    wanted = {name: (t.dtype, t.shape) for name, t in model_tensors(contents.model).items()}
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            mine, theirs = (_form(side.get(name)) for side in (wanted, found))
            raise PlanMismatchError(
                f"{path} belongs to another model: '{name.removeprefix('model/')}' is {theirs} in the file and {mine} "
                f"in the model; {hint}."
            )


def _form(form: tuple[torch.dtype, torch.Size] | None) -> str:
    return "not there" if form is None else f"{form[0]} of shape {tuple(form[1])}"


def _check_class(path: Path, what: str, saved: str, now: Any, is_saved: bool, hint: str) -> None:
    """Require the same kind of optimizer or schedule, or none in either place."""
    if is_saved and now is None:
        way = " pass it as `scheduler`" if what == "scheduler" else " give `fit` one"
        raise PlanMismatchError(f"{path} was saved with {'an' if what[0] == 'o' else 'a'} {what}, {saved}:{way}.")
    if now is not None and not is_saved:
        raise PlanMismatchError(f"{path} was saved without {what}, and one is given: load it without, or {hint}.")
    if now is not None and saved and saved != class_name(now):
        raise PlanMismatchError(f"{path} was saved with the {what} {saved}, and here is {class_name(now)}: {hint}.")


def _load_schedule(path: Path, scheduler: Any, state: Any, hint: str) -> Callable[[], None]:
    """Load a schedule, and return what undoes it."""
    before = copy.copy(vars(scheduler))

    def undo() -> None:
        vars(scheduler).clear()
        vars(scheduler).update(before)

    try:
        if missing := scheduler.state_dict().keys() - state.keys():
            raise ValueError(f"it lacks {min(missing)}")
        scheduler.load_state_dict(state)
    except Exception as error:
        undo()
        raise TableError(
            f"{path} has a state that {class_name(scheduler)} does not load ({_line(error)}): {hint}."
        ) from error
    return undo


def _states(packed: Any) -> Iterator[_State]:
    """Yield the states of parameters that are tensors."""
    for name, states in packed["dict"]:
        if name == "state":
            for position, values in states["dict"]:
                for key, value in values["dict"]:
                    if isinstance(value, dict) and "tensor" in value:
                        yield _State(position, key, value["tensor"])


def _check_forms(states: list[_State], parameters: list[torch.Tensor], contents: Contents, file: TensorSource) -> None:
    """Require that a state is one number for every parameter, or has the shape of each, or neither for any.

    Raises:
        ValueError: one is like its parameter and another of the same name is not.
    """
    kinds: dict[str, set[str]] = {}
    for s in states:
        form, like = file.forms[s.name], contents.like(parameters[s.position])
        if like.numel() > 1:
            kind = "number" if not form.dim() else "like" if form.shape == like.shape else "other"
            kinds.setdefault(s.key, set()).add(kind)
    wrong = sorted(key for key, found in kinds.items() if len(found) > 1)
    if wrong:
        raise ValueError(f"states '{wrong[0]}' are not alike")


def _prepared(
    path: Path, contents: Contents, optimizer: torch.optim.Optimizer, packed: Any, file: TensorSource, hint: str
) -> Callable[[], None]:
    """Check what is to be loaded; return a function that loads groups and numbers, then tensors one at a time."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        states = list(_states(packed))
        late = [s for s in states if file.forms[s.name].dim()]
        names = {s.name for s in late}

        def read(name: str) -> torch.Tensor:
            return torch.zeros((), dtype=file.forms[name].dtype, device="cpu") if name in names else file.get(name)

        state = unpack(packed, read)
        sizes = [len(group["params"]) for group in state["param_groups"]]
        positions = {s.position for s in late} | {p for p in state["state"] if isinstance(p, int)}
        if not positions <= set(range(len(parameters))):
            raise ValueError("a state is of no parameter")
        if type(optimizer).__module__.startswith("torch.optim."):  # in other optimizers states may have any shape
            _check_forms(states, parameters, contents, file)
    except _WRONG as error:
        raise TableError(f"{path} is damaged, or was changed after it was written ({_line(error)}): {hint}.") from error
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise PlanMismatchError(
            f"{path} is of an optimizer with groups of {sizes} parameters, and here they are of {own}: {hint}."
        )
    for s in late:
        form, parameter = file.forms[s.name], contents.like(parameters[s.position])
        if form.numel() == parameter.numel() and form.shape != parameter.shape and form.dim() == parameter.dim():
            raise PlanMismatchError(
                f"{path} has a state '{s.key}' of shape {tuple(form.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: {hint}."
            )
    _try_on_a_twin(path, optimizer, state, hint)

    def load() -> None:
        contents.load_optimizer_state(state)
        for s in late:
            contents.new_state(parameters[s.position], s.key, file, s.name)

    return load


def _try_on_a_twin(path: Path, optimizer: torch.optim.Optimizer, state: Any, hint: str) -> None:
    """Load the state into a twin first; it works for optimizers that keep all they load in groups and state."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin._optimizer_load_state_dict_pre_hooks = OrderedDict()
    twin._optimizer_load_state_dict_post_hooks = OrderedDict()
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    twin.state = type(optimizer.state)(getattr(optimizer.state, "default_factory", None))
    try:
        twin.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise TableError(
            f"{path} has a state that {class_name(optimizer)} does not load ({_line(error)}): {hint}."
        ) from error
