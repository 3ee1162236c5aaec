"""Optimizers as their authors publish them, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from tests.optimizers.kinds import Make, adamw
from tests.optimizers.small import assert_trains_alike, beside, small_batches, small_model, square

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, loss=square, say=lambda text: None)


def matrices(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    """Matrices in one group, with settings; the rest in another."""
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], **settings},
        {"params": [p for p in model.parameters() if p.ndim != 2]},
    ]


def published(package: str, name: str, wrap: Callable[[Any, nn.Module], torch.optim.Optimizer] | None = None) -> Make:
    """Made when it is asked for, if its package is installed."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(pytest.importorskip(package), name)
        found = wrap(kind, model) if wrap is not None else kind(model.parameters(), lr=1e-2)
        train = getattr(found, "train", None)
        if callable(train):
            train()
        return found  # type: ignore[no-any-return]

    return make


def _adafactor(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters(), scale_parameter=False, relative_step=False, lr=1e-2)  # type: ignore[no-any-return]


def _own_rate(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=None, warmup_init=True)  # type: ignore[no-any-return]


def _galore(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    groups = matrices(model, rank=4, update_proj_gap=2, scale=0.25, projection_type="std")
    return kind(groups, lr=1e-2)  # type: ignore[no-any-return]


PER_TENSOR: dict[str, Make] = {
    "Adafactor of transformers": published("transformers.optimization", "Adafactor", _adafactor),
    "Adafactor with its own rate": published("transformers.optimization", "Adafactor", _own_rate),
    "Muon": published("torch.optim", "Muon", lambda kind, m: kind(matrices(m)[0]["params"], lr=1e-2)),
    "foreach AdamW": published("torch.optim", "AdamW", lambda kind, m: kind(m.parameters(), foreach=True)),
}

JOINT: dict[str, Make] = {
    "ScheduleFree": published("schedulefree", "AdamWScheduleFree"),
    "ScheduleFree SGD": published("schedulefree", "SGDScheduleFree"),
    "Prodigy": published("prodigyopt", "Prodigy", lambda kind, m: kind(m.parameters(), slice_p=1)),
    "LAMB": published("pytorch_optimizer", "Lamb", lambda kind, m: kind(m.parameters(), lr=1e-2, pre_norm=True)),
    "Lookahead": published("pytorch_optimizer", "Lookahead", lambda kind, m: kind(adamw(m), k=2)),
    "GaLore": published("pytorch_optimizer", "GaLore", _galore),
}


@pytest.mark.parametrize("name", [*PER_TENSOR, *JOINT])
def test_trains_as_in_plain_pytorch(name: str, quick: Fit) -> None:
    make = (PER_TENSOR | JOINT)[name]
    model, other = small_model(), small_model()
    given = small_batches(6)
    step = quick(model, given[0], make(model), device_budget="92%", accumulate=2, max_grad_norm=1.0)
    assert step.updates_jointly == (name in JOINT)
    assert_trains_alike(step, beside(other, make(other), max_grad_norm=1.0), given, [False, True] * 3)
