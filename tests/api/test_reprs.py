"""What is printed of a step, a plan and a measurement; and a loss that says that the step has done it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from stowage.stages.ir.errors import ParameterError
from tests.api.test_lengths import Beside, Tagger, batch_of


@pytest.fixture(scope="module")
def beside(fit_stores: Path) -> Beside:
    return Beside(Tagger, fit_stores, 16)


def test_a_few_readable_lines(beside: Beside) -> None:
    measured = beside.step.measure(batch_of(16))
    for thing in (beside.step, beside.step.plan, beside.step.planned, measured):
        text = repr(thing)
        assert len(text.splitlines()) <= 6
        assert len(text) < 600
        assert "KiB" in text
    assert "(4, 16)" in repr(beside.step)
    assert beside.step.plan.method in repr(beside.step.plan)


def test_backward_says_that_the_step_has_done_it(beside: Beside) -> None:
    loss = beside.step(batch_of(16))
    for value in (loss, loss / 4, loss + loss, torch.stack([loss, loss]).mean()):
        with pytest.raises(ParameterError, match="has run backward already"):
            value.backward()


def test_otherwise_it_is_a_tensor_like_any_other(beside: Beside) -> None:
    loss = beside.step(batch_of(16))
    assert isinstance(loss, torch.Tensor)
    assert loss.shape == ()
    assert not loss.requires_grad
    plain = torch.tensor(loss.item())
    assert torch.equal(loss, plain)
    assert f"{loss:.3f}" == f"{plain:.3f}"
    assert (repr(loss), str(loss), float(loss)) == (repr(plain), str(plain), float(plain))
    assert sum([loss, loss]) == plain + plain
    assert loss.numpy() == plain.numpy()
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    kept: Any = torch.load(file)["loss"]
    assert type(kept) is type(copy.deepcopy(loss)) is torch.Tensor
    weight = torch.ones((), requires_grad=True)
    (loss * weight).backward()
    assert torch.equal(weight.grad, plain)  # type: ignore[arg-type]
