"""Arguments of `fit` that are none: one sentence each, before anything begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.flows.api.arguments import _RULES
from stowage.stages.ir.errors import ParameterError

WRONG: dict[str, list[Any]] = {
    "model": [None, "gpt2", nn.Linear, 3],
    "optimizer": ["AdamW", 3, [1]],
    "device_budget": [None, 1.5, True, "1,5GiB", "900MiB/2", "1e308%", "999999PiB", 0, -1, [], "x" * 5000, "\x00"],
    "host_budget": [1.5, True, []],
    "disk_budget": [1.5, True, {}],
    "loss": ["mse", 3, [nn.MSELoss()]],
    "forward": ["forward", 3],
    "resize": ["resize", 3],
    "forms": [3, None, "abc"],
    "accumulate": [0, -1, 1.5, True, "2", None, 1 << 63],
    "programs": [0, -1, 1.5, True, "2", None, 1 << 63],
    "method": [None, 3, "no_such_method", "x" * 5000, "a\nb", ""],
    "quick": ["yes", 1, None],
    "say": ["print", None, 3],
    "new_shapes": ["always", None, 3, []],
    "check": ["sometimes", None, 3, []],
    "offload_dir": [3, True, "", "a\x00b", "x" * 5000, ["x"], float("nan")],
    "weights": [3, "", "a\x00b"],
    "cache_dir": [3, "", "a\x00b", "x" * 5000],
    "lossy": ["int8", 3, True, ["int8"]],
    "freeze": ["ils", 0.9, True, ["ils"]],
    "max_grad_norm": [0, -1.0, "1", True, float("nan"), []],
}


def test_every_argument_is_looked_at() -> None:
    assert _RULES.keys() - {"objective"} <= WRONG.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_is_none_is_one_sentence(fit_stores: Path, name: str, value: Any) -> None:
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    given: dict[str, Any] = {
        "model": model,
        "batch": torch.randn(2, 4),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "device_budget": "150%",
        "loss": lambda outputs, batch: outputs.pow(2).mean(),
    }
    given[name] = value
    with pytest.raises(ParameterError, match=name) as caught:
        fit(given.pop("model"), given.pop("batch"), given.pop("optimizer"), **given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert all(map(torch.equal, before, model.parameters()))
