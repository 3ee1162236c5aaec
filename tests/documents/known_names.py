"""Every name that the repository has: files, functions, classes, fields, parameters, options, targets."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.documents.markdown_pages import ROOT

CODE = ("flows", "stages", "tests")
WORD = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def files() -> frozenset[str]:
    """List what Git has or would take, and the folders above."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found = {name for name in listed if name and (ROOT / name).exists()}
    return frozenset(found | {str(above) for name in found for above in Path(name).parents})


@functools.cache
def identifiers() -> frozenset[str]:
    """List what the code defines, and what stands in its strings without blanks: keys, choices,
    generated names."""
    found: set[str] = set()
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(ROOT / "tests" / "documents"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found.update(_defined(node))
    return frozenset(found)


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name) | ast.alias(name=name):
            yield name
        case ast.Constant(value=str(text)) if len(text) < 80 and " " not in text:
            yield from WORD.findall(text)
            yield text


@functools.cache
def options() -> frozenset[str]:
    """List the options of commands: parameters of functions in `flows`, and those written out in code or Makefile."""
    found = set()
    for folder in ("flows", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            found.update(re.findall(r"--[a-z][\w-]*", text))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.arg):
                    name = node.arg.replace("_", "-")
                    found.update({f"--{name}", f"--no-{name}"} if _is_switch(node) else {f"--{name}"})
    return frozenset(found | set(re.findall(r"--[a-z][\w-]*", (ROOT / "Makefile").read_text(encoding="utf-8"))))


def _is_switch(argument: ast.arg) -> bool:
    return argument.annotation is not None and "bool" in ast.unparse(argument.annotation)


@functools.cache
def parameters() -> frozenset[str]:
    """List the dotted keys of `params.yaml`."""

    def keys(value: Any, prefix: str) -> Iterator[str]:
        for key, inner in value.items() if isinstance(value, dict) else ():
            yield prefix + str(key)
            yield from keys(inner, f"{prefix}{key}.")

    return frozenset(keys(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8")), ""))


@functools.cache
def targets() -> frozenset[str]:
    """List the targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@functools.cache
def commands() -> frozenset[str]:
    """List the commands of the program `stowage`; none where it is not there."""
    if not is_module("stowage.flows.cli.commands"):
        return frozenset()
    return frozenset(importlib.import_module("stowage.flows.cli.commands").COMMANDS)


def is_module(name: str) -> bool:
    """Tell whether a dotted name is a module that can be imported, without importing it."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
