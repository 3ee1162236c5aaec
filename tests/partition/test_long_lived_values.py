"""Chains around values that live long: an encoder's result, inputs of a scan."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.defaults import MAX_EXACT_NODES
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import LONG_LIVED, NO_LONG_LIVED
from stowage.stages.options.clusters.regions import clusters_by_block, regions_of
from stowage.stages.partition import chains as cut
from stowage.stages.partition import make_chains
from stowage.stages.partition.clusters.block import block_clusters
from stowage.stages.partition.clusters.partition import Limits
from stowage.stages.partition.fold import fold
from stowage.stages.trace import trace_step
from tests.solve.synthetic_steps import costs_for
from tests.zoo import REMAT, ZOO

LAYERS, WIDTH = 9, 32


class Decoder(nn.Module):
    """Every layer reads what the first one made of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.read = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.norm(self.encode(x))
        for own, read in zip(self.own, self.read):
            x = x + self.dropout(torch.tanh(own(x)) * torch.sigmoid(read(memory)))
        return x


def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
    del batch
    return (outputs**2).mean()


BATCH = torch.linspace(-1, 1, 128 * WIDTH).reshape(128, WIDTH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


@cache
def traced(name: str) -> TraceTables:
    if name == "decoder":
        return trace_step(network(), BATCH, loss=loss)
    model, batch, own = (REMAT | ZOO)[name]()
    return trace_step(model, batch, loss=own, label=name)


@pytest.mark.parametrize("name", ["decoder", "transformer", "t5"])
def test_one_large_block_becomes_many(name: str) -> None:
    trace = traced(name)
    chains = make_chains(trace, costs_for(trace))
    plain, long_lived = chains[""], chains[LONG_LIVED]
    assert max(len(b.nodes) for b in plain.blocks) > MAX_EXACT_NODES >= max(len(b.nodes) for b in long_lived.blocks)
    assert Counter(c for n in long_lived.nodes for c in n.calls) == Counter(c for n in plain.nodes for c in n.calls)
    inside = {s for b in long_lived.blocks for s in b.storages}
    beside = {s for n in long_lived.nodes if n.block >= 0 for s in n.creates} - inside
    assert beside
    for node in long_lived.nodes:
        assert node.once or beside.isdisjoint(node.creates), "what is long_lived is made once"
    for block in long_lived.blocks:
        graph = BlockGraph.from_json(block.graph)
        made = {a for n in graph.nodes for a in n.creates} | set(graph.incoming)
        assert made.issuperset((*graph.output, *graph.outgoing))
        assert all(made.issuperset(n.reads) for n in graph.nodes)


def test_a_chain_of_small_blocks_holds_nothing() -> None:
    trace = traced("gpt2")
    chains = make_chains(trace, costs_for(trace))
    assert list(chains) == [""]
    assert not chains[""].clusters


def test_a_block_that_stays_large_has_clusters() -> None:
    trace = traced("gpt2")
    (made,) = make_chains(trace, costs_for(trace), max_blocks=1).values()
    assert len(made.blocks) == 1
    assert {c.block_hash for c in made.clusters} == {made.blocks[0].block_hash}
    assert made.clusters[-1].node_count == BlockGraph.from_json(made.blocks[0].graph).forward_count


class Residual(nn.Module):
    """Layers of many operations each around a result that the last one reads as the first one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.inside = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.tanh(self.first(x)) * torch.sigmoid(self.last(x))
        x = x + early
        for k, norm in enumerate(self.norms):
            one, two = self.inside[2 * k : 2 * k + 2]
            inner = norm(x)
            x = x + torch.sigmoid(one(inner)) * torch.tanh(two(inner)) * torch.relu(inner)
        return self.last(x + early)


@pytest.mark.parametrize("name", ["decoder", "residual", "t5"])
def test_clusters_run_what_makes_a_long_lived_value_before_what_reads_it(name: str) -> None:
    """A block does not count what is long-lived, so that nothing but its clusters' order says who comes first."""
    if name == "residual":
        torch.manual_seed(0)
        trace = trace_step(Residual(), BATCH, loss=loss)
    else:
        trace = traced(name)
    limits = Limits(4)
    seen = 0
    folded = fold(trace, costs_for(trace)).nodes
    for long_lived_from in (4, 8, 16):
        nodes, blocks = cut.partition(trace, folded, smallest_block=24, long_lived_from=long_lived_from)
        rows = clusters_by_block(block_clusters(trace, nodes, blocks, limits))
        for block in (b for b in blocks if b.block_hash in rows):
            graph = BlockGraph.from_json(block.graph)
            inside = [nodes[n] for n in block.nodes]
            maker = {s: k for k, n in enumerate(inside) for s in n.creates}
            order = regions_of(graph, rows[block.block_hash]).forward
            place = {k: position for position, k in enumerate(order)}
            for k in order:
                before = {maker[s] for s in inside[k].reads if s in maker}
                seen += any(len(graph.nodes[m].creates) < len(inside[m].creates) for m in before)
                assert all(place[m] < place[k] for m in before)
    assert seen


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_huge_block_that_holding_makes_small_is_in_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "HUGE", MAX_EXACT_NODES)
    trace = traced("decoder")
    assert list(make_chains(trace, costs_for(trace))) == [LONG_LIVED]
    step = fit(network(), BATCH, adam, device_budget="60%", loss=loss, quick=True, cache_dir=tmp_path)
    assert step.plan.variant.endswith(LONG_LIVED)
    whole = fit(
        network(), BATCH, adam, device_budget="60%", loss=loss, method="hiremate", quick=True, cache_dir=tmp_path
    )
    assert "+" not in whole.plan.variant, "methods of the whole step cut it in their own way"
    torch.manual_seed(7)
    found = [step(BATCH).item() for _ in range(2)]
    torch.manual_seed(7)
    assert found == [whole(BATCH).item() for _ in range(2)]


def test_training_around_held_values_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "HUGE", MAX_EXACT_NODES)  # one large block is in no plan
    model, eager = network(), network()
    step = fit(model, BATCH, adam, device_budget="60%", loss=loss, quick=True, cache_dir=tmp_path)
    assert step.plan.variant.endswith(LONG_LIVED)
    budget = step.plan.device_budget_bytes
    optimizer = adam(eager.parameters())
    torch.manual_seed(7)
    planned = [step(BATCH).item() for _ in range(3)]
    torch.manual_seed(7)
    plain = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(eager(BATCH), BATCH)
        value.backward()
        optimizer.step()
        plain.append(value.item())
    assert planned == plain
    for one, other in zip(step.model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert step.measure(BATCH).peak_bytes <= budget


def test_what_is_too_large_to_be_solved_exactly_is_cut_into_clusters() -> None:
    """With one threshold no block is neither."""
    trace = traced("gpt2")
    costs = costs_for(trace)
    largest = max(len(b.nodes) for b in make_chains(trace, costs)[NO_LONG_LIVED].blocks)
    assert largest <= MAX_EXACT_NODES
    limit = largest - 1
    for made in make_chains(trace, costs, max_exact_nodes=limit).values():
        large = {b.block_hash for b in made.blocks if len(b.nodes) > limit}
        assert {c.block_hash for c in made.clusters} == large or LONG_LIVED in make_chains(
            trace, costs, max_exact_nodes=limit
        )
