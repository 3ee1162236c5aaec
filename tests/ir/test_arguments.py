"""Arguments of a call: JSON in the tables, Python in generated code."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.ir.arguments import map_arguments, render_arguments
from stowage.stages.ir.updates import UpdateRule, update_arguments, updated_parameter
from tests.matrix import examples


def render(*args: Any, **kwargs: Any) -> str:
    return render_arguments(json.dumps({"args": args, "kwargs": kwargs}), lambda v: f"t{v}")


@pytest.mark.parametrize(
    ("item", "source"),
    [
        (None, "None"),
        (True, "True"),
        (3, "3"),
        (1.5, "1.5"),
        ("a'b", '"a\'b"'),
        ([1, [2, None]], "[1, [2, None]]"),
        ({"value": 7}, "t7"),
        ([{"value": 1}, {"value": 2}], "[t1, t2]"),
        ({"float": "-inf"}, 'float("-inf")'),
        ({"complex": [1.0, -2.0]}, "complex(1.0, -2.0)"),
        ({"dtype": "float32"}, "torch.float32"),
        ({"device": "cuda:0"}, 'torch.device("cuda:0")'),
        ({"layout": "strided"}, "torch.strided"),
        ({"memory_format": "channels_last"}, "torch.channels_last"),
    ],
)
def test_source_of_an_argument(item: Any, source: str) -> None:
    assert render(item) == source
    assert render(key=item) == f"key={source}"


def test_positions_then_keywords() -> None:
    assert render({"value": 0}, 2, dim=-1, dtype={"dtype": "int64"}) == "t0, 2, dim=-1, dtype=torch.int64"


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.recursive(numbers, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=4))
def test_source_evaluates_to_the_argument(arguments: list[Any]) -> None:
    assert eval(f"[{render(*arguments)}]") == arguments


def test_source_evaluates_to_torch_values() -> None:
    text = render({"float": "nan"}, {"float": "inf"}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"layout": "strided"})
    nan, inf, dtype, device, layout = eval(f"[{text}]", {"torch": torch, "float": float})
    assert math.isnan(nan)
    assert inf == math.inf
    assert (dtype, device, layout) == (torch.bfloat16, torch.device("cpu"), torch.strided)


def test_leaves_are_decoded_where_they_stand() -> None:
    text = json.dumps({"args": [[{"value": 1}, 5]], "kwargs": {"out": {"value": 2}}})
    assert map_arguments(text, lambda key, content: (key, content)) == ([[("value", 1), 5]], {"out": ("value", 2)})


def test_an_update_states_its_rule() -> None:
    rule = UpdateRule("torch.optim.adamw:AdamW", '{"eps": 1e-08}')
    text = update_arguments("layer.weight", 12, rule)
    assert updated_parameter(text) == ("layer.weight", rule)
    assert map_arguments(text, lambda key, content: (key, content))[0] == ["layer.weight", ("value", 12)]
