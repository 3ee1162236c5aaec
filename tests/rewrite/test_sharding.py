"""Parameters become shards, and weights are gathered before they are read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stowage.stages.ir.collectives import GATHER, SCATTER, ShardForm
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.updates import UPDATE
from stowage.stages.trace import MicroBatch, trace_step


class Tied(nn.Module):
    """One matrix reads and writes, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


class Convolutions(nn.Module):
    """A weight with strides of its own, a scalar, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(5, 1, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) * self.scale * self.frozen).square().mean()


def trace(model: nn.Module, batch: torch.Tensor, ranks: int) -> TraceTables:
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    return trace_step(
        model, (batch,), loss=lambda out, batch: out, optimizer=optimizer, micro_batch=MicroBatch(ranks=ranks)
    )


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "tied": lambda: (Tied(), torch.randint(0, 7, (2, 5))),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 3, 8, 8)),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_who_reads_what(case: str, ranks: int) -> None:
    """Shards are read by gathers and updates alone; each update takes the scattered shard of its gradient."""
    model, batch = CASES[case]()
    found = trace(model, batch, ranks)
    parameters = dict(model.named_parameters())
    shards = {s.storage: s.name for s in found.storages if s.role == "parameter"}
    assert set(shards.values()) == set(parameters)
    for storage, name in shards.items():
        form = ShardForm.of(parameters[name].shape, parameters[name].stride(), ranks)
        assert form is not None
        assert found.storages[storage].nbytes == 4 * form.shard_elements
    gathered: set[str] = set()
    for call in found.calls:
        read = {shards[found.values[v].storage] for v in call.reads if found.values[v].storage in shards}
        if call.target == GATHER:
            gathered |= read
            whole = [tuple(found.values[v].shape) for v in call.returns]
            strides = [tuple(found.values[v].stride) for v in call.returns]
            owners = [parameters[shards[found.values[v].storage]] for v in call.reads]
            assert whole == [tuple(p.shape) for p in owners]
            assert strides == [p.stride() for p in owners]
        elif call.target == UPDATE:
            (maker,) = [c for c in found.calls if call.reads[0] in c.returns]
            assert maker.target == SCATTER
        else:
            assert not read, f"{call.target} reads shards"
    assert gathered == set(parameters)
    states = [s for s in found.storages if s.role == "state" and "exp_avg" in s.name]
    sizes = {name: found.storages[s].nbytes for s, name in shards.items()}
    assert states
    assert all(s.nbytes == sizes[s.name.partition("::")[0]] for s in states)


def test_tied_weights_are_gathered_for_each_block_that_reads_them() -> None:
    model, batch = CASES["tied"]()
    found = trace(model, batch, 2)
    names = [[found.storages[found.values[v].storage].name for v in c.reads] for c in found.calls if c.target == GATHER]
    assert [name for names_of in names for name in names_of].count("embed.weight") == 2
    scattered = [v for c in found.calls if c.target == SCATTER for v in c.reads]
    assert len(scattered) == len(set(scattered)) == len(list(model.parameters()))


def test_one_rank_changes_nothing() -> None:
    model, batch = CASES["tied"]()
    alone = trace(model, batch, 1)
    assert not [c for c in alone.calls if c.target in (GATHER, SCATTER)]
    plain = trace_step(model, (batch,), loss=lambda out, batch: out, optimizer=torch.optim.AdamW(model.parameters()))
    assert alone.calls == plain.calls
    assert alone.meta.configuration_hash == plain.meta.configuration_hash


def test_a_parameter_that_the_step_changes_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.count.add_(1.0)
            return (x * self.weight * self.count).sum()

    with pytest.raises(ParameterError, match="'count' is changed in place"):
        trace(Changing(), torch.randn(4), 2)


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 9), st.permutations([0, 1, 2, 3]))
def test_shards_cover_each_element_once(shape: list[int], ranks: int, order: list[int]) -> None:
    """Whatever the strides: memory is cut into equal stretches, and padding is at the end alone."""
    tensor = torch.arange(max(torch.Size(shape).numel(), 1)).reshape(shape)
    tensor = (
        tensor.permute([i for i in order if i < len(shape)])
        .contiguous()
        .permute(torch.argsort(torch.tensor([i for i in order if i < len(shape)], dtype=torch.long)).tolist())
    )
    form = ShardForm.of(tensor.shape, tensor.stride(), ranks)
    assert form is not None
    assert form.elements == tensor.numel()
    assert sum(form.own_rows(r) for r in range(ranks)) == form.rows
    assert form.padded_elements >= form.elements > form.padded_elements - ranks * max(form.row, 1) - form.shard_elements
    memory = tensor.as_strided((tensor.numel(),), (1,))
    pieces = [memory[r * form.shard_elements : (r + 1) * form.shard_elements] for r in range(ranks)]
    assert torch.cat(pieces).tolist() == memory.tolist()
    assert [p.numel() for p in pieces] == [form.own_rows(r) * form.row for r in range(ranks)]
