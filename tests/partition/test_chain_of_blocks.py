"""Cuts are found in the graph alone, blocks are whole and replayable, and identical ones share a hash."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.formulations.block.fixed import keep_all, recompute_all
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import TableError
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.partition import make_blocks
from stowage.stages.simulate.block import replay_block
from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.solve.prepared import prepared_zoo
from tests.solve.synthetic_steps import costs_for
from tests.zoo import GPT2, LLAMA, ZOO

LAYERS = {"gpt2": 3, "gpt2_mask": 3, "llama": 2, "mistral": 2, "phi": 2, "bloom": 2, "bert": 2, "vit": 2}


def blocks_of(trace: TraceTables, **more: Any) -> tuple[list[ComputeNode], list[Block]]:
    return make_blocks(trace, costs_for(trace), **more)


@pytest.mark.parametrize("name", LAYERS)
def test_two_blocks_a_layer_and_more(name: str) -> None:
    """Attention and feed-forward of each layer; phi computes both from one input, so it may have one block a layer."""
    blocks = prepared_zoo(name).blocks
    assert len(blocks) >= (1 if name == "phi" else 2) * LAYERS[name] + 1


def test_a_mask_that_every_layer_reads_hides_no_cut() -> None:
    plain, masked = prepared_zoo("gpt2"), prepared_zoo("gpt2_mask")
    assert len(plain.blocks) == len(masked.blocks)
    shared = [n for n in masked.nodes if n.block == SHARED]
    assert shared
    assert all(n.phase == "forward" and not n.random for n in shared)


def gpt2(layers: int) -> list[Block]:
    model = build_model("gpt2", {**GPT2, "n_layer": layers}, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    return blocks_of(trace_step(model, sample_batch(model, 2, 12, 1), optimizer=optimizer))[1]


def test_a_deeper_model_has_more_blocks_and_the_same_distinct_ones() -> None:
    four, six = gpt2(4), gpt2(6)
    per_layer = (len(six) - len(four)) // 2
    assert per_layer >= 2
    hashes = [Counter(b.block_hash for b in blocks) for blocks in (four, six)]
    assert hashes[0].keys() == hashes[1].keys()
    assert len(hashes[0]) < len(four)
    assert sum((hashes[1] - hashes[0]).values()) == 2 * per_layer
    assert len({b.graph for b in six}) >= len(hashes[1])


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", LLAMA), ("gpt2", {**GPT2, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0})],
)
def test_cuts_need_no_dropout(architecture: str, overrides: dict[str, Any]) -> None:
    """Nothing random then marks where the batch enters the chain."""
    model = build_model(architecture, overrides, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    _, blocks = blocks_of(trace_step(model, sample_batch(model, 2, 12, 1), optimizer=optimizer))
    assert len(blocks) >= 5


def test_autocast_hides_no_cut() -> None:
    """Casts of weights count where the weight is read."""

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for layer in self.layers:
                    x = torch.tanh(torch.relu(layer(x)))
            return x.float().mean()

    _, blocks = blocks_of(trace_step(Autocast(), (torch.randn(4, 8),)))
    assert len(blocks) >= 4


class Functions(nn.Module):
    """Parameters in one flat list and no modules at all: nothing to recognise layers by."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 8 for _ in range(2 * layers))

    def forward(self, x: torch.Tensor) -> Any:
        for i in range(0, len(self.weights), 2):
            x = x + torch.tanh(F.layer_norm(x, (8,)) @ self.weights[i]).relu() @ self.weights[i + 1]
        return x.pow(2).mean()


def test_cuts_need_no_modules() -> None:
    model = Functions(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, blocks = blocks_of(trace_step(model, (torch.randn(4, 8),), optimizer=optimizer))
    assert len(blocks) >= 5
    assert len({b.block_hash for b in blocks}) < len(blocks)


@pytest.mark.parametrize("name", ["tied", "t5", "transformer", "gpt2", "gpt2_untied", "unet", "lstm"])
def test_every_node_is_in_one_place(name: str) -> None:
    prepared = prepared_zoo(name)
    assert [n.node for n in prepared.nodes] == list(range(len(prepared.nodes)))
    calls = sorted(c for n in prepared.nodes for c in n.calls)
    assert calls == [c.call for c in prepared.trace.calls if not c.is_view]
    in_blocks = sorted(n for b in prepared.blocks for n in b.nodes)
    assert in_blocks == [n.node for n in prepared.nodes if n.block != SHARED]
    for block in prepared.blocks:
        assert all(prepared.nodes[n].block == block.block for n in block.nodes)
    made = [s for n in prepared.nodes for s in n.creates]
    assert len(made) == len(set(made)), "each storage is made by one node"
    temporary = {s.storage for s in prepared.trace.storages if s.role == "temporary"}
    assert set(made) == temporary


@pytest.mark.parametrize("name", ZOO)
def test_blocks_are_legal_graphs(name: str) -> None:
    prepared = prepared_zoo(name)
    for block in prepared.blocks:
        graph = BlockGraph.from_json(block.graph)
        assert graph.content_hash() == block.block_hash
        assert len(graph.nodes) == len(block.nodes)
        assert len(graph.allocations) == len(block.storages)
        for storage, allocation in zip(block.storages, graph.allocations):
            assert allocation.nbytes == prepared.trace.storages[storage].nbytes
        plain = replay_block(graph, keep_all(graph))
        replay_block(graph, recompute_all(graph))
        assert plain.recomputed_bytes == 0
    for before, after in zip(prepared.blocks, prepared.blocks[1:]):
        lower, upper = BlockGraph.from_json(before.graph), BlockGraph.from_json(after.graph)
        given = {before.storages[a] for a in lower.incoming}
        assert given <= {after.storages[a] for a in upper.outgoing}, "the gradient that one leaves the other receives"
    assert not BlockGraph.from_json(prepared.blocks[-1].graph).incoming


@pytest.mark.parametrize("name", ["gpt2", "tied", "t5", "resnet", "gpt2_frozen", "transformer"])
def test_updates_come_after_gradients_and_readers(name: str) -> None:
    prepared = prepared_zoo(name)
    trace = prepared.trace
    maker = {s: n.node for n in prepared.nodes for s in n.creates}
    updates = [n for n in prepared.nodes if n.phase == "update"]
    assert len(updates) == sum(g.gradient_value >= 0 for g in trace.gradients)
    for update in updates:
        gradient, parameter = (trace.values[v].storage for v in trace.calls[update.calls[0]].reads)
        assert maker[gradient] < update.node
        readers = [n for n in prepared.nodes if parameter in n.reads and n.phase != "update"]
        assert all(n.node < update.node for n in readers)
        # Nothing that belongs to an earlier point of the backward pass is still to come in a later block.
        assert all(n.block >= update.block for n in readers if n.block != SHARED)
        assert update.once


def test_updates_do_not_wait_for_the_whole_backward_pass() -> None:
    prepared = prepared_zoo("gpt2")
    blocks = {n.block for n in prepared.nodes if n.phase == "update"}
    assert len(blocks) > LAYERS["gpt2"]


def test_nodes_are_in_an_order_that_runs() -> None:
    for name in ("gpt2_mask", "t5", "resnet", "lstm"):
        prepared = prepared_zoo(name)
        there = {s.storage for s in prepared.trace.storages if s.role != "temporary"}
        draws = []
        for node in prepared.nodes:
            assert there.issuperset(node.reads), f"{name}: {node.name}"
            there.update(node.creates)
            if node.random:
                draws.append(min(c for c in node.calls if prepared.trace.calls[c].is_random))
        assert draws == sorted(draws), "eager's order of random draws"


def test_in_place_calls_are_folded_into_the_node_that_owns_the_storage() -> None:
    prepared = prepared_zoo("in_place")
    temporary = {s.storage for s in prepared.trace.storages if s.role == "temporary"}
    owner = {s: n.node for n in prepared.nodes for s in n.creates}
    node_of = {c: n.node for n in prepared.nodes for c in n.calls}
    written = [(c.call, s) for c in prepared.trace.calls for s in c.mutates if s in temporary]
    assert written
    assert all(node_of[call] == owner[storage] for call, storage in written)


def test_batch_statistics_may_be_computed_again_and_counted_batches_not() -> None:
    prepared = prepared_zoo("batchnorm")
    changing = [n for n in prepared.nodes if n.mutates and n.phase == "forward"]
    norms = [n for n in changing if n.creates]
    counts = [n for n in changing if not n.creates]
    assert norms
    assert counts
    assert not any(n.once for n in norms)
    assert all(n.once for n in counts)


def test_the_loss_is_made_once() -> None:
    for name in ("gpt2", "y_sum", "tied"):
        prepared = prepared_zoo(name)
        loss = prepared.trace.values[prepared.trace.meta.loss_value].storage
        (node,) = [n for n in prepared.nodes if loss in n.creates]
        assert node.once
        assert loss in [prepared.blocks[-1].storages[a] for a in outgoing(prepared.blocks[-1])]


def outgoing(block: Block) -> tuple[int, ...]:
    return BlockGraph.from_json(block.graph).outgoing


def test_fewer_blocks_on_request() -> None:
    trace = prepared_zoo("gpt2").trace
    for limit in (1, 2, 4):
        nodes, blocks = blocks_of(trace, max_blocks=limit)
        assert 1 <= len(blocks) <= limit
        assert sum(len(b.nodes) for b in blocks) + sum(n.block == SHARED for n in nodes) == len(nodes)


def test_a_missing_cost_is_named() -> None:
    trace = prepared_zoo("y_sum").trace
    costs = costs_for(trace)
    lacking = next(c for c in trace.calls if c.target == "aten.tanh.default")
    del costs[lacking.signature]
    with pytest.raises(TableError, match=r"lack call aten.tanh.default .* run the profile stage"):
        make_blocks(trace, costs)


def test_an_estimated_cost_marks_its_node() -> None:
    trace = prepared_zoo("y_sum").trace

    def source(call_cost: Cost) -> Cost:
        kind = "roofline" if "tanh.default" in call_cost.signature else "measured"
        return Cost(**{**vars(call_cost), "source": kind})

    nodes, _ = make_blocks(trace, {s: source(c) for s, c in costs_for(trace).items()})
    estimated = {trace.calls[c].target for n in nodes if n.estimated for c in n.calls}
    assert "aten.tanh.default" in estimated
    assert not any(n.estimated for n in nodes if n.phase == "update")


class Viewed(nn.Module):
    """A view of a view that two operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(x * self.weight).view(2, 12).transpose(0, 1)
        return (torch.exp(seen) + torch.sin(seen)).sum()


def test_the_first_reader_of_a_view_pays_for_it() -> None:
    """With the views that it is made of, and later readers do not."""
    trace = trace_step(Viewed(), (torch.randn(4, 6),), loss=lambda outputs, _: outputs)
    costs = costs_for(trace)
    dear = {c.signature for c in trace.calls if c.target in ("aten.view.default", "aten.transpose.int")}
    nodes, _ = make_blocks(trace, {s: replace(c, time_s=1.0) if s in dear else c for s, c in costs.items()})
    forward = {trace.calls[n.calls[0]].target: n.time_s for n in nodes if n.phase == "forward"}
    assert forward["aten.exp.default"] == pytest.approx(2.0, abs=0.01)
    assert forward["aten.sin.default"] < 0.01
    assert forward["aten.tanh.default"] < 0.01


def test_a_view_without_a_cost_is_named() -> None:
    trace = trace_step(Viewed(), (torch.randn(4, 6),), loss=lambda outputs, _: outputs)
    costs = costs_for(trace)
    del costs[next(c.signature for c in trace.calls if c.target == "aten.view.default")]
    with pytest.raises(TableError, match=r"lack call aten.view.default .* run the profile stage"):
        make_blocks(trace, costs)


class Windows(nn.Module):
    """Four equal steps, each on a window of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(8, 6)
        for i in range(4):
            state = torch.tanh(x[:, i] + state @ self.weight)
        return state.sum()


def test_equal_steps_on_other_windows_stay_equal() -> None:
    """`x[:, 0]` and `x[:, 1]` are distinct calls, measured one by one; their costs must not tell equal blocks apart."""
    trace = trace_step(Windows(), (torch.randn(8, 4, 6),), loss=lambda outputs, _: outputs)
    costs = costs_for(trace)
    windows = sorted({c.signature for c in trace.calls if c.target == "aten.select.int"})
    assert len(windows) == 4
    costs |= {s: replace(costs[s], time_s=1e-3 * (i + 1)) for i, s in enumerate(windows)}
    nodes, _ = make_blocks(trace, costs)
    sums = [n for n in nodes if n.phase == "forward" and trace.calls[n.calls[0]].target == "aten.add.Tensor"]
    assert len({n.time_s for n in sums}) == 1
    assert sums[0].time_s == pytest.approx(2.5e-3, rel=0.01)
