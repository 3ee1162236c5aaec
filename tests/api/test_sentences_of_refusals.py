"""What is refused says who is at fault and gives a remedy, and the remedy works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stowage.flows import fit
from stowage.stages.ir.errors import StowageError
from tests.api.beside_plain import ROWS, WIDTH, adamw, mlp, rows, square

Case = tuple[nn.Module, Any, Callable[[Any, Any], torch.Tensor]]


class _With(nn.Module):
    """A net, and something behind it, one level down."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.net, self.behind = mlp(), behind

    def forward(self, x: Any, *more: Any) -> Any:
        return self.behind(self.net(x), *more)


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def lazy(mended: bool) -> Case:
    """A layer that gets its shape from the first batch."""
    model, batch = _With(nn.LazyLinear(4)), rows(1)[0]
    if mended:
        model(batch)
    return model, batch, square


def sparse(mended: bool) -> Case:
    """An embedding with sparse gradients."""
    model = nn.Sequential(nn.Embedding(64, WIDTH, sparse=not mended), mlp())
    return model, torch.randint(0, 64, (ROWS,)), square


def generator(mended: bool) -> Case:
    """Noise from a generator of its own."""
    own = torch.Generator().manual_seed(0)
    noise = _Calls(lambda x: x + (torch.randn(WIDTH) if mended else torch.randn(WIDTH, generator=own)))
    return _With(noise), rows(1)[0], square


class _Packs(nn.Module):
    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.cell, self.packs = nn.GRU(WIDTH, WIDTH, batch_first=True), packs

    def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        inputs: Any = pack_padded_sequence(x, lengths, batch_first=True) if self.packs else x
        found = self.cell(inputs)[0]
        out: torch.Tensor = pad_packed_sequence(found, batch_first=True)[0] if self.packs else found
        return out


def packed(mended: bool) -> Case:
    """Packed sequences."""
    return _Packs(not mended), (torch.randn(3, 9, WIDTH), torch.tensor([9, 7, 4])), square


def ctc(mended: bool) -> Case:
    """A kernel that sizes its tables by what is in a tensor."""
    targets = torch.randint(1, WIDTH, (6, 10))

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        scores = F.log_softmax(outputs.view(100, 6, WIDTH), -1)
        if mended:
            return -torch.logsumexp(scores.gather(2, targets.t().repeat(10, 1).unsqueeze(2)), 0).mean()
        return F.ctc_loss(scores, targets, torch.full((6,), 100), torch.full((6,), 10))

    return mlp(), rows(1)[0], loss


def random_numbers(mended: bool) -> Case:
    """A random number of Python's."""
    import random

    mix = _Calls(lambda x: x * (torch.rand(()) if mended else random.random()))
    return _With(mix), rows(1)[0], square


def masked(mended: bool) -> Case:
    """A boolean mask."""

    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.where(outputs > 0, outputs, 0.0).sum() if mended else outputs[outputs > 0].sum()

    return mlp(), rows(1)[0], loss


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (lazy, r"Module 'behind' \(.*\) has parameters .* run one batch through the model"),
        (sparse, r"Module '0' \(.*\) has sparse=True, .* make it with sparse=False"),
        (generator, r"Module 'behind' \(.*test_sentences.*:\d+\) draws from a torch\.Generator .* global generator"),
        (packed, r"The model \(.*test_sentences.*:\d+\) makes .* on the padded sequences"),
        (ctc, r"The loss \(.*test_sentences.*:\d+\) makes .* torch\.logsumexp"),
        (random_numbers, r"draws numbers from Python's random, .* torch\.rand"),
        (masked, r"The loss \(.*test_sentences.*:\d+\) makes a tensor whose shape depends on data .* torch\.where"),
    ],
)
def test_the_remedy_works(case: Callable[[bool], Case], says: str) -> None:
    model, batch, loss = case(False)
    with pytest.raises(StowageError, match=says) as caught:
        fit(model, batch, adamw(model) if case is not lazy else None, device_budget="150%", loss=loss, quick=True)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert "''" not in text
    assert "unknown line" not in text
    assert caught.value.__cause__ is None, "one short traceback"
    model, batch, loss = case(True)
    step = fit(model, batch, adamw(model), device_budget="150%", loss=loss, quick=True, say=lambda text: None)
    assert torch.isfinite(step(batch))


def test_old_weight_norm_trains() -> None:
    """Its weight is an attribute that forward replaces: it is left behind as in plain PyTorch."""
    from tests.api.beside_plain import Script, trains_equally

    def make() -> Script:
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(WIDTH, 32)), nn.ReLU(), nn.Linear(32, WIDTH))
        return Script(model, adamw(model), square, rows())

    trains_equally(make, "100%")


def test_a_distribution_that_looks_at_its_arguments_trains() -> None:
    """It looks in order to raise: the plan does so after the step."""
    from tests.api.beside_plain import Script, trains_equally

    def make() -> Script:
        model, actions = mlp(), torch.randint(0, WIDTH, (ROWS,))

        def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
            return -torch.distributions.Categorical(logits=outputs).log_prob(actions).mean()

        return Script(model, adamw(model), loss, rows())

    trains_equally(make, "150%")


def test_a_long_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOWAGE_TRACEBACK", "long")

    def fails(*_: Any) -> torch.Tensor:
        raise ValueError("the user's own")

    model = mlp()
    with pytest.raises(StowageError, match=r"The loss .*ValueError: the user's own") as caught:
        fit(model, rows(1)[0], adamw(model), device_budget="150%", loss=fails, quick=True)
    assert isinstance(caught.value.__cause__, ValueError)
