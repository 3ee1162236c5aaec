"""What is recorded of a call is what its real kernel returns: strides, bytes of storages, shared memory. A sweep over
operators, forward and backward, in the memory formats of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from stowage.stages.kernels import known_outputs
from stowage.stages.kernels.known import KnownOutputs
from stowage.stages.trace.recording import fake
from stowage.stages.trace.recording.fake import TrueKernels
from tests.matrix import some
from tests.trace.functions import FORMATS, LOSSES, NAMES, called, channels_last
from tests.trace.real_beside_fake import RealBesideFake
from tests.zoo import ZOO


def compared(run: Callable[[], Any]) -> RealBesideFake:
    """Forward and backward; what an operator does not take is left out, for real and fake kernels alike."""
    beside = RealBesideFake(TrueKernels())
    with beside:
        made = [t for t in _tensors(run()) if t.requires_grad and t.is_floating_point()]
        if made:
            total = sum((t.double().square().sum() for t in made), torch.zeros((), dtype=torch.double))
            try:
                total.backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "derivative" not in str(error):
                    raise
    return beside


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)] if isinstance(result, (list, tuple)) else []


@pytest.mark.parametrize("form", some(FORMATS, keep=["contiguous", "channels_last"]))
def test_no_operator_differs(form: str) -> None:
    calls, taken, different = 0, 0, {}
    for name in NAMES:
        torch.manual_seed(0)
        x = FORMATS[form]().requires_grad_()
        try:
            called(name, x.detach())
        except (RuntimeError, ValueError, IndexError):
            continue  # not of this shape
        beside = compared(lambda name=name, x=x: called(name, x))  # type: ignore[misc]
        calls, taken = calls + beside.calls, taken + 1
        different |= beside.different
    for loss in LOSSES.values():
        torch.manual_seed(0)
        x = FORMATS[form]()
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        beside = compared(lambda loss=loss, x=x, given=given: loss(given, x.flip(0)))  # type: ignore[misc]
        calls, taken = calls + beside.calls, taken + 1
        different |= beside.different
    assert different == {}
    assert taken > 0.7 * (len(NAMES) + len(LOSSES)), "most operators take every form"
    assert calls > 5 * taken


def test_none_and_a_tensor_in_another_order_are_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same forms; what is known of one says nothing of the other. Another size of one does."""
    known = KnownOutputs()
    monkeypatch.setattr(fake, "known_outputs", lambda: known)
    kernels, index = TrueKernels(), torch.ops.aten.index.Tensor
    with FakeTensorMode():
        where = torch.zeros(64, dtype=torch.int64)
        for rows in (1024, 2048):
            x = torch.empty(rows, rows)
            assert kernels(index, (x, [None, where]), {}).shape == (rows, 64)
            assert kernels(index, (x, [where, None]), {}).shape == (64, rows)
    assert len(known.tried) == 4
    assert len(known.small) == 2


def test_fake_kernels_alone_differ() -> None:
    """What is tested above is not true by itself."""
    beside = RealBesideFake(lambda func, args, kwargs: func(*args, **kwargs))
    x = channels_last(torch.rand(2, 4, 6, 6)).requires_grad_()
    with beside:
        y = F.hardswish(F.channel_shuffle(torch.roll(x, 1, 2), 2))
        F.mse_loss(y, torch.zeros(2, 4, 6, 6)).backward()  # type: ignore[no-untyped-call]
    operators = {text.partition(".default")[0] for text in beside.different}
    assert {"aten.roll", "aten.channel_shuffle", "aten.mse_loss"} <= operators


@pytest.mark.parametrize("name", some(ZOO, keep=["gpt2", "resnet", "lstm"]))
def test_no_call_of_a_model_differs(name: str) -> None:
    model, batch, loss = ZOO[name]()
    beside = RealBesideFake(TrueKernels())
    opaque = "rnn_layer"  # its workspace is known to the real kernel alone; see `true_outputs`
    with beside:
        outputs = model(**batch)
        (loss(outputs, batch) if loss else outputs.loss).backward()
    assert {text: pair for text, pair in beside.different.items() if opaque not in text} == {}


@pytest.mark.parametrize("most", [1 << 40, 0], ids=["run as it is", "never run as it is"])
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "transposed"])
def test_large_calls(form: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are run in a smaller form, whose pattern tells what the whole one returns."""
    monkeypatch.setattr(fake, "SMALL_BYTES", 0)
    monkeypatch.setattr(fake, "MOST_BYTES", most)
    shape = {
        "contiguous": lambda: torch.rand(3, 24, 40, 40),
        "channels_last": lambda: channels_last(torch.rand(3, 24, 40, 40)),
        "transposed": lambda: torch.rand(40, 40, 24, 3).permute(3, 2, 1, 0),
    }[form]
    known_outputs().tried.clear()
    try:
        for work in (
            lambda x: torch.roll(x, (1, 2), (2, 3)),
            lambda x: x.log_softmax(1),
            F.hardswish,
            F.elu,
            lambda x: F.glu(x, 1),
            lambda x: F.mse_loss(x, torch.rand(3, 24, 40, 40)),
            lambda x: F.smooth_l1_loss(x, torch.rand(3, 24, 40, 40)),
            lambda x: F.binary_cross_entropy(x, torch.rand(3, 24, 40, 40)),
            lambda x: F.conv2d(x, torch.rand(8, 24, 3, 3), padding=1),
            lambda x: F.layer_norm(x, x.shape[-1:]),
        ):
            x = shape().requires_grad_()
            assert compared(lambda work=work, x=x: work(x)).different == {}  # type: ignore[misc]
    finally:
        known_outputs().tried.clear()


def test_random_numbers_are_drawn_as_if_nothing_had_been_tried() -> None:
    known_outputs().tried.clear()
    x = torch.rand(3, 5)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch._subclasses.FakeTensorMode() as mode:
        given = mode.from_tensor(x)
        for func in (torch.ops.aten.bernoulli.p, torch.ops.aten.native_dropout.default):
            TrueKernels()(func, (given, 0.5, *([True] if "dropout" in str(func) else [])), {})
        TrueKernels()(torch.ops.aten.add.Tensor, (given, given), {})
    assert torch.equal(torch.get_rng_state(), state)
