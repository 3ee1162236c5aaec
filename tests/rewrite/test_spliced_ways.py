"""Blocks of two rewrites side by side: spliced nodes and blocks are those of the mixed trace, folded and cut anew."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.partition import make_blocks
from stowage.stages.rewrite import (
    Way,
    exchangeable,
    mixed,
    needed_variant,
    pack_masks,
    rewritten,
    variant_named,
)
from stowage.stages.trace import trace_step
from tests.solve.synthetic_steps import costs_for


def layers() -> TraceTables:
    """Layers whose masks weigh as much as their activations."""
    torch.manual_seed(0)
    stack = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
    batch = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)
    model = nn.Sequential(*stack)
    return trace_step(model, batch, loss=lambda out, _: (out**2).mean(), optimizer=torch.optim.Adam(model.parameters()))


def gpt2() -> TraceTables:
    """Three dropouts a layer, one of them on the attention's weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16, attn_implementation="eager")
    )
    ids = torch.arange(32).reshape(2, 16)
    return trace_step(model.train(), {"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW(model.parameters()))


def way(name: str, trace: TraceTables) -> Way:
    nodes, blocks = make_blocks(trace, costs_for(trace))
    return Way(name, trace, nodes, blocks)


@pytest.mark.parametrize("record", [layers, gpt2], ids=["layers", "gpt2"])
def test_a_mixed_step_is_cut_as_the_mixed_trace_is(record: object) -> None:
    trace = record()  # type: ignore[operator]
    ways = [way("plain", trace), way("packed", pack_masks(trace))]
    blocks = exchangeable(*ways)
    assert len(blocks) >= 4, "each layer has masks"
    draw = random.Random(3)
    for _ in range(6):
        taken = [draw.randrange(2) if b in blocks else 0 for b in range(len(ways[0].blocks))]
        found = mixed(ways, taken)
        assert found is not None
        nodes, cut = make_blocks(found.trace, costs_for(found.trace))
        assert found.nodes == nodes
        assert found.blocks == cut
        bits = sum(s.name.endswith(".bits") for s in found.trace.storages)
        assert (bits > 0) == any(taken)
        assert variant_named(ways, found.name) == found if any(taken) else found.name == "plain"
        assert rewritten(trace, found.name) == found.trace


def test_steps_that_are_cut_otherwise_are_not_mixed() -> None:
    trace = layers()
    plain = way("plain", trace)
    packed = pack_masks(trace)
    nodes, blocks = make_blocks(packed, costs_for(packed), max_blocks=3)
    assert exchangeable(plain, Way("packed", packed, nodes, blocks)) == ()
    assert exchangeable(plain, plain) == ()


def test_a_name_says_what_is_taken_where() -> None:
    name = VariantName.at({"packed": [0, 1, 4], "other": [3, 5, 6]}, "long_lived")
    assert name.text == "packed[0-1,4]+other[3,5-6]+long_lived"
    assert VariantName.of(name.text) == name
    assert name.parts == [("packed", (0, 1, 4)), ("other", (3, 5, 6))]
    assert VariantName.of("packed+long_lived").parts == [("packed", None)]


@pytest.mark.parametrize(
    "name", ["nothing[0]", "packed[999]", "packed[]", "packed[1-]", "packed[0]+long_lived", "plain[0]"]
)
def test_a_name_of_something_else_is_found_nowhere(name: str) -> None:
    trace = layers()
    ways = [way("plain", trace), way("packed", pack_masks(trace))]
    assert variant_named(ways, name) is None
    with pytest.raises(TableError, match="do not make its variant"):
        needed_variant(ways, name)
