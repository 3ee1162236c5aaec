"""Finds which model a project plans: from the command line, `params.yaml`, the project's module, or a terminal."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stowage.stages.inputs.named import SOURCE_FOLDERS
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.settings.load import read_parameters

Kind = Literal["callable", "architecture", "directory"]
KINDS: tuple[Kind, ...] = ("callable", "architecture", "directory")

USUAL = "my_model:build"
"""The model that is suggested: a function of the user's."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ARCHITECTURE = re.compile(r"[A-Za-z][\w-]*")
_QUESTION = (
    "Which model? A function `module:function` of yours, a model type of transformers such as gpt2, or the folder of a "
    "checkpoint"
)


@dataclass(frozen=True)
class Model:
    """The model that `trace.model` of `params.yaml` names: one of its three keys, and its value."""

    kind: Kind
    value: str

    @property
    def module(self) -> str:
        """Return the module of a function; empty for other kinds."""
        return self.value.partition(":")[0] if self.kind == "callable" else ""

    @property
    def function(self) -> str:
        """Return the function's name in its module."""
        return self.value.partition(":")[2]


def model_of(text: str, root: Path) -> Model:
    """Return the model that a person means by `--model TEXT`.

    Raises:
        ParameterError: it can be none of the three.
    """
    if _FUNCTION.fullmatch(text):
        return Model("callable", text)
    if (root / text).is_dir():
        return Model("directory", text)
    if _ARCHITECTURE.fullmatch(text):
        return Model("architecture", text)
    raise ParameterError(
        f"--model {text!r} is neither `module:function`, nor a model type of transformers such as gpt2, nor a folder "
        "that is there: give one of these."
    )


def choose_model(given: str | None, root: Path, ask: Callable[[str, str], str]) -> Model:
    """Return the project's model: `given`, or the one that `params.yaml` has, or the answer of a person.

    Args:
        given: the value of `--model`.
        root: the project's folder.
        ask: asks a question with a default answer on the terminal.

    Raises:
        ParameterError: `given` names no model.
        StowageError: nothing is given, nothing is there, and there is no terminal to ask on.
    """
    if given is not None:
        return model_of(given, root)
    if (present := present_model(root)) is not None:
        return present
    if module_file(root, USUAL.partition(":")[0]) is not None:
        return Model("callable", USUAL)
    if sys.stdin.isatty():
        return model_of(ask(_QUESTION, USUAL).strip(), root)
    raise StowageError(
        f"It is not known which model to plan: give `--model {USUAL}` (a function of yours; where it is not there yet, "
        "an example is written), `--model gpt2` (a model type of transformers) or `--model FOLDER` (a checkpoint)."
    )


def present_model(root: Path) -> Model | None:
    """Return the model that `params.yaml` names already."""
    path = root / "params.yaml"
    if not path.is_file():
        return None
    trace = read_parameters(path).get("trace")
    model = trace.get("model") if isinstance(trace, dict) else None
    if not isinstance(model, dict):
        return None
    return next((Model(kind, str(model[kind])) for kind in KINDS if model.get(kind)), None)


def module_file(root: Path, module: str) -> Path | None:
    """Return the file of a module of the project's own, relative to `root`; None where it has no such module."""
    path = Path(*module.split("."))
    candidates = (Path(f) / p for f in SOURCE_FOLDERS for p in (path / "__init__.py", path.with_suffix(".py")))
    return next((candidate for candidate in candidates if (root / candidate).is_file()), None)


def names_in(path: Path) -> set[str]:
    """Return names that the top level of a Python file defines or imports.

    Raises:
        StowageError: the file is not Python.
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        raise StowageError(
            f"{path} cannot be read as Python ({error}): mend it and run the same command again."
        ) from error
    found: set[str] = set()
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
