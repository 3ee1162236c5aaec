"""A run that freezes goes on from a checkpoint with the numbers of one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Freeze, fit, stow
from stowage.stages.ir.errors import PlanMismatchError
from tests.configurations.alongside import batches, small_gpt2
from tests.matrix import some
from tests.runtime.beside_eager import differences, same

Fit = Callable[..., Any]


@pytest.fixture
def quick(fit_stores: Path) -> Fit:
    """`fit` that plans in seconds and says nothing."""
    return partial(fit, cache_dir=fit_stores, quick=True, device_budget="150%", say=lambda text: None)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Remembers:
    """A policy of a user that never trains what it trained the time before."""

    def __init__(self) -> None:
        self.before: list[str] = []

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        self.before = sorted(set(dynamics) - set(self.before), key=dynamics.__getitem__)[:2]
        return self.before

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = list(state["before"])


def chosen(step: Any) -> frozenset[str]:
    found: frozenset[str] = step.frozen.schedule.active()
    return found


@pytest.mark.parametrize(
    ("policy", "distance"),
    some(
        [("ils", "l1"), ("ils", "relative"), (Remembers, "l1")]
        + [(name, "l1") for name in ("random", "round_robin", "progressive", "prefix")],
        keep=[("ils", "l1"), ("ils", "relative"), (Remembers, "l1"), ("random", "l1")],
    ),
)
def test_resumed_equals_uninterrupted(policy: Any, distance: Any, quick: Fit, tmp_path: Path) -> None:
    def made(model: nn.Module) -> Any:
        own = policy() if isinstance(policy, type) else policy
        return quick(model, given[0], adamw, freeze=Freeze(0.8, own, distance=distance))

    given = batches(small_gpt2(), 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        whole = made(small_gpt2())
        losses, masks = [], []
        for i in range(10):
            masks.append(chosen(whole))
            losses.append(whole(given[i % 3]))
            if i == 4:
                whole.save(tmp_path / "checkpoint")
        torch.manual_seed(2)
        resumed = made(small_gpt2())
        resumed.load(tmp_path / "checkpoint")
        for i in range(5, 10):
            assert chosen(resumed) == masks[i]
            assert same(resumed(given[i % 3]), losses[i])
    assert differences(resumed.model, whole.model) == []
    assert same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert resumed.frozen.state_dict() == whole.frozen.state_dict()
    if policy == "ils":
        assert len(set(masks)) > 3


def test_checkpoints_of_other_runs_are_refused(quick: Fit, tmp_path: Path) -> None:
    model = small_gpt2()
    batch = batches(model, 1)[0]
    frozen = quick(model, batch, adamw, freeze=Freeze(0.8))
    frozen(batch)
    frozen.save(tmp_path / "frozen")
    whole = quick(small_gpt2(), batch, adamw)
    whole(batch)
    whole.save(tmp_path / "whole")
    before = {n: p.detach().clone() for n, p in whole.model.named_parameters()}
    with pytest.raises(PlanMismatchError, match="saved by a run with `freeze`, and this one is without"):
        whole.load(tmp_path / "frozen")
    with pytest.raises(PlanMismatchError, match="saved by a run without `freeze`, and this one is with"):
        frozen.load(tmp_path / "whole")
    with pytest.raises(PlanMismatchError, match="saved with the policy Ils, and here is Random"):
        quick(small_gpt2(), batch, adamw, freeze=Freeze(0.8, "random")).load(tmp_path / "frozen")
    with pytest.raises(PlanMismatchError, match="other units to freeze"):
        quick(small_gpt2(), batch, adamw, freeze=Freeze(0.8, units="block")).load(tmp_path / "frozen")
    assert all(torch.equal(p, before[n]) for n, p in whole.model.named_parameters())


def test_a_trainer_resumes(fit_stores: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    given = batches(small_gpt2(), 12, rows=1)
    rows = [{k: v[0] for k, v in batch.items()} for batch in given]

    def trainer(folder: Path, steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=2, max_steps=steps, save_steps=3, report_to=[],
            learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True, use_cpu=True, seed=3, logging_steps=1,
        )  # fmt: skip
        made = transformers.Trainer(small_gpt2(), arguments, train_dataset=rows)
        more: dict[str, Any] = {"cache_dir": fit_stores, "quick": True, "say": lambda text: None}
        return stow(made, device_budget="150%", freeze=Freeze(0.8), **more)

    whole = trainer(tmp_path / "whole", 6)
    whole.train()
    again = trainer(tmp_path / "again", 6)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert (tmp_path / "whole" / "checkpoint-3" / "freezing.json").is_file()
    assert again.stowage.step.frozen.state_dict() == whole.stowage.step.frozen.state_dict()
    assert differences(again.model, whole.model) == []
