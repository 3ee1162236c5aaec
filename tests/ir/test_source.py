"""Whatever a string is, generated code has it as a literal, or not at all."""

from __future__ import annotations

import ast
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.ir.arguments import map_arguments, render_arguments
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.source import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    can_be_value,
    file_name,
    operator_name,
    quoted,
    remark,
    role_of,
)

EVIL = [
    'w" if not eval("1") else "w',
    "back\\",
    "new\nline",
    "quote'",
    '"""',
    "\x00",
    "\u2028",
    "é🙂",
    "\ud800",
    "#",
    "",
]


@given(st.text() | st.sampled_from(EVIL))
def test_a_literal_is_the_text_again(text: str) -> None:
    literal = quoted(text)
    assert ast.literal_eval(literal) == text
    assert "\n" not in literal


@given(st.text() | st.sampled_from(EVIL))
def test_a_remark_stays_one(text: str) -> None:
    tree = ast.parse(f'"""About {remark(text)}."""\nx = 1  # {remark(text)}\n')
    assert [type(node) for node in tree.body] == [ast.Expr, ast.Assign]


@given(st.text() | st.sampled_from([*EVIL, "run", "aten", "def", "__import__", "ﬁ"]))
def test_names_of_values_are_names(text: str) -> None:
    if can_be_value(text):
        assert isinstance(ast.parse(text, mode="eval").body, ast.Name)
        assert text not in ("run", "aten", "torch")


@pytest.mark.parametrize(("names", "kind"), [(DTYPES, torch.dtype), (LAYOUTS, torch.layout)])
def test_the_lists_are_torchs(names: frozenset[str], kind: type) -> None:
    found = {name: getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), kind)}
    assert {str(value).removeprefix("torch.") for value in found.values()} - {"bit"} <= names
    assert all(isinstance(getattr(torch, name, next(iter(found.values()))), kind) for name in names)


def test_the_list_of_memory_formats_is_torchs() -> None:
    assert all(isinstance(getattr(torch, name), torch.memory_format) for name in MEMORY_FORMATS)


WRONG_LEAVES = [
    {"dtype": "load"},
    {"dtype": 'float32"); eval("1'},
    {"layout": "float32"},
    {"memory_format": "__class__"},
    {"device": 'cpu"); eval("1'},
    {"device": 3},
    {"float": "__import__('os')"},
    {"complex": ["1", "x"]},
    {"complex": [1]},
    {"value": "x"},
    {"value": -1},
    {"value": True},
    {"number": 1},
    {"ops": "x"},
    {"a": 1, "b": 2},
    {},
]


@pytest.mark.parametrize("leaf", WRONG_LEAVES, ids=json.dumps)
def test_arguments_are_of_known_kinds(leaf: object) -> None:
    text = json.dumps({"args": [[leaf]], "kwargs": {}})
    with pytest.raises(TableError, match="dvc repro"):
        render_arguments(text, lambda value: f"v{value}")
    with pytest.raises(TableError, match="dvc repro"):
        map_arguments(text, lambda key, content: None)


@pytest.mark.parametrize("text", ["", "[]", "1", '{"args": {}, "kwargs": {}}', '{"args": [], "kwargs": {"a b": 1}}'])
def test_other_texts_are_no_arguments(text: str) -> None:
    with pytest.raises(TableError, match="dvc repro"):
        render_arguments(text, str)


@pytest.mark.parametrize("target", ["aten.add", "aten.add.Tensor.x", "a b.c.d", "aten.add.Tensor(1)", "x.y.z\n"])
def test_operators_have_three_parts(target: str) -> None:
    with pytest.raises(TableError, match="operator"):
        operator_name(target)


@pytest.mark.parametrize("source", ["random:x", "parameter", "_tier:x", "__class__:x"])
def test_values_come_from_known_places(source: str) -> None:
    if source == "parameter":
        assert role_of(source) == ("parameter", "")
        return
    with pytest.raises(TableError, match="where a value comes from"):
        role_of(source)


@pytest.mark.parametrize("name", ["../../../X", "/etc/passwd", "", ".", "..", "a/b", "a\\b", "a\nb", "x" * 200])
def test_names_of_files_lead_nowhere_else(name: str) -> None:
    with pytest.raises(TableError, match="name of a plan"):
        file_name(name, "a plan")
