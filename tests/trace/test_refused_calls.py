"""Tensors, modules and calls that no plan can have are refused in one sentence with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.flows import fit
from stowage.stages.ir.errors import TraceError
from stowage.stages.trace import trace_step

WIDTH = 8
X = torch.ones(WIDTH, WIDTH)
ADJACENCY = torch.eye(WIDTH).to_sparse()


class Calls(nn.Module):
    """A layer, and something behind it."""

    def __init__(self, behind: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.behind = nn.Linear(WIDTH, WIDTH), behind

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.behind(self, self.layer(x), *more)


def mean(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


def refused(model: nn.Module, *batch: torch.Tensor) -> str:
    with pytest.raises(TraceError) as caught:
        trace_step(model, batch or (X,), loss=mean)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def multiplied(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(model.adjacency, x)


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_sparse_tensors(form: str) -> None:
    matrix = ADJACENCY if form == "coo" else ADJACENCY.to_dense().to_sparse_csr()
    as_buffer, as_attribute = Calls(multiplied), Calls(multiplied)
    as_buffer.register_buffer("adjacency", matrix)
    object.__setattr__(as_attribute, "adjacency", matrix)
    assert refused(as_buffer).startswith(f"The buffer 'adjacency' is sparse (sparse_{form})")
    assert f"reads a tensor that is sparse (sparse_{form})" in refused(as_attribute)
    in_batch = Calls(lambda _, x, matrix: torch.sparse.mm(matrix, x))
    assert refused(in_batch, X, matrix).startswith(f"The batch's tensor '1' is sparse (sparse_{form})")


def test_sparse_tensors_that_forward_reads_or_makes() -> None:
    assert "reads a tensor that is sparse" in refused(Calls(lambda _, x: torch.sparse.mm(ADJACENCY, x)))
    assert "makes a tensor that is sparse" in refused(Calls(lambda _, x: torch.sparse.mm(X.to_sparse(), x)))


def test_a_sparse_tensor_that_the_step_does_not_use() -> None:
    model = Calls(lambda _, x: x)
    object.__setattr__(model, "adjacency", ADJACENCY)
    trace_step(model, (X,), loss=mean)


@pytest.mark.parametrize(
    "gradient",
    [
        lambda model, x: F.embedding(torch.arange(4), model.layer.weight, sparse=True),
        lambda model, x: torch.gather(x, 0, torch.zeros(2, WIDTH, dtype=torch.long), sparse_grad=True),
    ],
)
def test_sparse_gradients_of_functions(gradient: Any) -> None:
    text = refused(Calls(gradient))
    assert "makes a sparse gradient" in text
    assert "sparse=False" in text


def test_programs() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    scripted = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(inner))
    traced = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.trace(inner, X))  # type: ignore[no-untyped-call]
    for model, function in ((scripted, "script"), (traced, "trace")):
        with pytest.raises(
            TraceError, match=rf"Module '1' \(.*\) is a program of torch\.jit\.{function}: pass"
        ) as caught:
            fit(model, X, None, device_budget="100%", loss=mean)
        assert str(caught.value).endswith(".")


def test_modules_that_read_values() -> None:
    from torch.ao.quantization import FakeQuantize

    average = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
    assert "momentum=0.1" in refused(average)
    quantized = nn.Sequential(nn.Linear(WIDTH, WIDTH), FakeQuantize())
    assert "torch.fake_quantize_per_tensor_affine" in refused(quantized)
    trace_step(Calls(lambda _, x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255)), (X,), loss=mean)


def seeded(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.randn(WIDTH)


def forked_and_seeded(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.randn(WIDTH)


def forked(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn(WIDTH)


def put_back(_: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    noise = torch.randn(WIDTH)
    torch.set_rng_state(state)
    return x + noise


def by_the_generator(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(3)
    return x + torch.randn(WIDTH)


@pytest.mark.parametrize("seeds", [seeded, forked_and_seeded, forked, put_back, by_the_generator])
def test_seeding(seeds: Callable[..., torch.Tensor]) -> None:
    model, before = Calls(seeds), torch.get_rng_state()
    text = refused(model)
    assert "seeds PyTorch's random generator or puts it back" in text
    assert ("test_refused_calls.py" in text) is (seeds is not by_the_generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.random.default_generator is torch.default_generator


def test_a_state_that_is_put_back_where_nothing_was_drawn() -> None:
    def nothing_drawn(_: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x)
        with torch.random.fork_rng(devices=[]):
            return x + 1

    trace_step(Calls(nothing_drawn), (X,), loss=mean)


def test_a_window_that_the_step_makes(tmp_path: Path) -> None:
    """Its memory is larger than its fake kernel says, and it is made of no tensor."""

    def windowed(_: Any, x: torch.Tensor) -> torch.Tensor:
        found = torch.stft(x.flatten(), 16, window=torch.hann_window(16), return_complex=True)
        return torch.istft(found, 16, window=torch.hann_window(16))

    model = Calls(windowed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fit(model, X, optimizer, device_budget="smallest", loss=mean, cache_dir=tmp_path, say=lambda text: None)
    assert torch.isfinite(step(X))
