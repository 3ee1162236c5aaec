"""Checks what a generated step consists of before it runs, whoever wrote the file.

Allowed are assignments, `del`, `with run.…`, `if run.active(…)`, and calls of ATen operators, of `run`'s methods and of
a few methods of tensors, over names that the step itself has assigned and literals. Nothing else is executed: no other
import, attribute, builtin or expression. (The hash in the manifest finds accidents; whoever can write `step.py` can
write the hash too.)
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from types import EllipsisType
from typing import NoReturn

import torch

import stowage.stages.kernels  # noqa: F401 -- registers operators of our own, which a step may call
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.operators import ALIKE, FUNCTIONS, METHODS
from stowage.stages.ir.source import ROLES, WORDS
from stowage.stages.runtime.executors.verbs import AROUND, CONDITIONS, VERBS

_HEAD = """\
import torch
from torch import Tensor
from stowage.stages.runtime import Iteration
aten = torch.ops.aten
@torch.no_grad()
def step(run: Iteration) -> {returns}:
    pass
"""
_RETURNS = ("Tensor", "list[Tensor]")
_AROUND = frozenset({*(f"run.{verb}" for verb in AROUND), "run.random.record", "run.random.replay"})
_CONDITIONS = frozenset(f"run.{verb}" for verb in CONDITIONS)
_TENSOR = frozenset((*METHODS.values(), *ALIKE.values(), "clone"))
_FUNCTIONS = frozenset(f"torch.{name}" for name in FUNCTIONS.values())
_WORDS = frozenset().union(*WORDS.values())
_FORBIDDEN = frozenset({"aten.from_file"})
"""Operators that read files."""
_ATEN = ("aten.", "torch.ops.aten.")
_LITERALS = (type(None), bool, int, float, str)
_READS = ROLES | {"number"}


def checked(source: str, filename: str, operators: Collection[str] = ()) -> ast.Module:
    """Return the syntax tree of a generated step, if it is allowed.

    Args:
        source: the text of the step.
        filename: the name that errors give to the text.
        operators: operators of the trace that are not ATen's, such as `mylib.add.default`; the step may call them too.

    Raises:
        PlanMismatchError: it is no step, or holds something that no step has.
    """
    try:
        module = ast.parse(source, filename)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlanMismatchError(f"{filename} is no generated step ({error}): run `dvc repro` again.") from None
    _Checker(filename, operators).module(module)
    return module


class _Checker:
    """Walks a step in the order of execution."""

    def __init__(self, filename: str, operators: Collection[str]) -> None:
        self._filename = filename
        self._others = frozenset(operators)
        self._names: set[str] = set()
        self._operators: dict[str, bool] = {}

    def _refuse(self, node: ast.AST, what: str) -> NoReturn:
        raise PlanMismatchError(
            f"{self._filename}, line {getattr(node, 'lineno', 1)}, has {what}, which no generated step has, and is not "
            "run: run `dvc repro` again."
        )

    def module(self, module: ast.Module) -> None:
        """Check the whole text."""
        body = module.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        if not body or not isinstance(body[-1], ast.FunctionDef):
            self._refuse(module, "no function at its end")
        step = body[-1]
        hollow = copy.copy(step)
        hollow.body = [ast.Pass()]
        found = ast.dump(ast.Module([*body[:-1], hollow], []))
        if all(found != ast.dump(ast.parse(_HEAD.format(returns=returns))) for returns in _RETURNS):
            self._refuse(step, "another head")
        for statement in step.body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self._expression(value)
                self._assign(target)
            case ast.Expr(value=ast.Call() as call):
                self._call(call)
            case ast.Delete(targets=targets):
                for target in targets:
                    if not isinstance(target, ast.Name) or target.id not in self._names:
                        self._refuse(node, "a deletion of something that it has not made")
                    self._names.remove(target.id)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=None)], body=body):
                if _path(call.func) not in _AROUND:
                    self._refuse(node, "a block of another kind")
                self._arguments(call)
                for inner in body:
                    self._statement(inner)
            case ast.Assign(targets=targets, value=ast.Constant(value=None)):
                for target in targets:
                    self._assign(target)
            case ast.If(test=test, body=body, orelse=[]):
                self._condition(test)
                for inner in body:
                    self._statement(inner)
            case ast.Return(value=ast.expr() as value):
                self._expression(value)
            case _:
                self._refuse(node, f"a statement of the kind {type(node).__name__}")

    def _condition(self, node: ast.expr) -> None:
        """Check what an `if` asks: whether some units train, or that none does."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node = node.operand
        if not isinstance(node, ast.Call) or not _is_condition(node):
            self._refuse(node, "a condition of another kind")

    def _assign(self, target: ast.expr) -> None:
        match target:
            case ast.Name(id=name) if name not in ("run", "aten", "torch", "float", "complex"):
                self._names.add(name)
            case ast.Tuple(elts=parts):
                for part in parts:
                    if not isinstance(part, ast.Name | ast.Tuple):
                        self._refuse(target, "an assignment to something else than names")
                    self._assign(part)
            case _:
                self._refuse(target, "an assignment to something else than names")

    def _expression(self, node: ast.expr) -> None:
        kind = type(node)  # a step has thousands of them: the frequent kinds are checked without patterns
        if kind is ast.Name and node.id in self._names:  # type: ignore[attr-defined]
            return
        if kind is ast.Constant and type(node.value) in _LITERALS:  # type: ignore[attr-defined]
            return
        if kind is ast.List or kind is ast.Tuple:
            for part in node.elts:  # type: ignore[attr-defined]
                self._expression(part)
            return
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
                return
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values):
                    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                        self._refuse(node, "a dictionary with other keys than names")
                    self._expression(value)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _WORDS:
                return
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id="run"), attr=role), slice=ast.Constant(value=str())
            ) if role in _READS:
                return
            case ast.Call():
                self._call(node)
            case _:
                self._refuse(node, f"an expression of the kind {type(node).__name__}")

    def _call(self, node: ast.Call) -> None:
        if _is_condition(node):
            return
        self._arguments(node)
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner, method = function.value.id, function.attr
            if (owner in self._names and method in _TENSOR) or (owner == "run" and method in VERBS):
                return
        path = _path(function)
        if path in ("float", "complex") and all(map(_is_literal, node.args)) and not node.keywords:
            return
        if path == "torch.device" and all(isinstance(a, ast.Constant) for a in node.args) and not node.keywords:
            return
        if path in _FUNCTIONS or path == "run.random.forget" or (path is not None and self._is_operator(path)):
            return
        self._refuse(node, f"a call of {path or 'something unnamed'}")

    def _is_operator(self, path: str) -> bool:
        if path not in self._operators:
            known = path.startswith(_ATEN) or path.removeprefix("torch.ops.") in self._others
            self._operators[path] = known and _is_operator(path)
        return self._operators[path]

    def _arguments(self, node: ast.Call) -> None:
        for argument in node.args:
            self._expression(argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                self._refuse(node, "arguments that are not written out")
            self._expression(keyword.value)


def _is_condition(node: ast.Call) -> bool:
    """Return whether a call asks about units: names alone, with `...` between two of them."""
    words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str | EllipsisType)]
    return _path(node.func) in _CONDITIONS and len(words) == len(node.args) and not node.keywords


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.UnaryOp)


def _path(node: ast.expr) -> str | None:
    """Return the dotted path of nested attributes of a name, such as `torch.ops.aten.add.Tensor`."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _is_operator(path: str) -> bool:
    """Return whether a path is an overload of a registered operator, and none that reads files."""
    parts = path.removeprefix("torch.ops.").split(".")
    if not (path.startswith(("aten.", "torch.ops."))) or len(parts) != 3 or ".".join(parts[:2]) in _FORBIDDEN:
        return False
    try:
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        return False
    return isinstance(found, torch._ops.OpOverload)
