"""The rows of parameter groups: what they hold, and that a few traced blocks stand for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows.api.sharding.profile import Profile, profile_groups
from stowage.flows.benchmarks.papers.machines import MACHINES
from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.workload.models import build_model
from stowage.stages.workload.repeated import Repeated, repeated_lists
from stowage.stages.workload.samples import sample_batch
from tests.zoo import GPT2, LLAMA, ZOO

TARGET = MACHINES["RTX 3090"].device


def profile(model: nn.Module, batch: Any, folder: Path, *, few: bool = True, loss: Any = None) -> Profile:
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    return profile_groups(model, batch, stores=folder, optimizer=optimizer, target=TARGET, few=few, loss=loss)


def test_every_parameter_is_in_one_group_and_tied_weights_in_the_models_own(tmp_path: Path) -> None:
    model, batch, _ = ZOO["gpt2"]()
    groups = profile(model, batch, tmp_path).groups
    assert [g.modules for g in groups] == [("",), *((f"transformer.h.{i}",) for i in range(3))]
    names = [name for g in groups for name in g.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "transformer.wte.weight" in groups[0].parameters
    assert sum(g.elements for g in groups) == sum(p.numel() for p in model.parameters())
    assert all(g.stored_bytes == 4 and g.state_bytes == 8 and g.trainable == g.elements for g in groups)
    block = groups[1]
    assert block.saved_bytes <= block.forward_peak_bytes
    assert block.backward_peak_bytes >= block.saved_bytes > 0
    assert block.backward_s > block.forward_s > 0


def test_parameters_are_in_the_order_in_which_forward_reads_them(tmp_path: Path) -> None:
    model, batch, _ = ZOO["llama"]()
    names = [n.rpartition("layers.0.")[2] for n in profile(model, batch, tmp_path).groups[1].parameters]
    assert names.index("input_layernorm.weight") == 0
    assert names.index("self_attn.o_proj.weight") < names.index("post_attention_layernorm.weight")
    assert names[-1] == "mlp.down_proj.weight"


def test_frozen_parameters_have_no_gradient_and_no_state(tmp_path: Path) -> None:
    model, batch, _ = ZOO["gpt2_frozen"]()
    groups = profile(model, batch, tmp_path).groups
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    for group in groups:
        sizes = {n: model.get_parameter(n).numel() for n in group.parameters}
        assert group.trainable == sum(size for n, size in sizes.items() if n not in frozen)


class Halves(nn.Module):
    """An embedding and two blocks, each with an own weight beside its child's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.inside = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inside(x * self.scale)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Halves.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def of_halves(folder: Path, *frozen: str) -> dict[str, ParameterGroup]:
    model = Halves()
    for path in frozen:
        model.get_submodule(path).requires_grad_(False)
    batch = {"x": torch.zeros(4, 8, dtype=torch.int64)}
    found = profile(model, batch, folder, loss=lambda outputs, batch: outputs)
    return {g.modules[0]: g for g in found.groups}


def test_a_group_that_reads_nothing_with_a_gradient_is_reduced_after_the_root(tmp_path: Path) -> None:
    groups = of_halves(tmp_path)
    assert {path: g.after_root for path, g in groups.items()} == {"": 0, "embedding": 1, "blocks.0": 0, "blocks.1": 0}
    assert not any(g.idle_in_backward for g in groups.values())
    groups = of_halves(tmp_path, "embedding", "blocks.0.inside")
    assert {path: g.after_root for path, g in groups.items()} == {"": 0, "embedding": 1, "blocks.0": 2, "blocks.1": 0}
    assert [path for path, g in groups.items() if g.idle_in_backward] == ["embedding"]


def test_the_last_gradient_is_that_of_the_last_parameter_of_a_module_after_those_of_its_children(
    tmp_path: Path,
) -> None:
    groups = of_halves(tmp_path)
    assert groups["embedding"].last_trainable == 64 * 8
    assert groups["blocks.0"].last_trainable == 8  # `scale`, though it is used first
    model = Halves()
    model.blocks[0].scale.requires_grad_(False)
    model.blocks[0].inside.bias.requires_grad_(False)
    batch = {"x": torch.zeros(4, 8, dtype=torch.int64)}
    found = profile(model, batch, tmp_path, loss=lambda outputs, batch: outputs).groups
    assert next(g for g in found if g.modules == ("blocks.0",)).last_trainable == 8 * 8


BUILD = {
    "gpt2": lambda layers: build_model("gpt2", GPT2 | {"n_layer": layers}, seed=0),
    "llama": lambda layers: build_model("llama", LLAMA | {"num_hidden_layers": layers}, seed=0),
    "t5": lambda layers: build_model(
        "t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4, "vocab_size": 64}, seed=0
    ),
    "opt": lambda layers: build_model(
        "opt",
        {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 64,
         "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        seed=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILD)
def test_rows_of_a_few_blocks_are_those_of_a_full_trace(name: str, tmp_path: Path) -> None:
    model = BUILD[name](6)
    batch = sample_batch(model, 2, 12, 1)
    before = {n: id(p) for n, p in model.named_parameters()}
    few = profile(model, batch, tmp_path)
    assert few.traced
    assert all(count < 6 for count in few.traced.values())
    whole = profile(model, batch, tmp_path, few=False)
    assert not whole.traced
    assert few.groups == whole.groups
    assert {n: id(p) for n, p in model.named_parameters()} == before


def test_blocks_that_alternate_are_traced_in_their_pattern(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.inside = nn.Linear(8, 16 if number % 2 else 32)
            self.out = nn.Linear(16 if number % 2 else 32, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.out(torch.tanh(self.inside(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(i) for i in range(12))

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    model = Net()
    batch = {"x": torch.zeros(4, 8)}
    loss = lambda outputs, batch: outputs  # noqa: E731
    few, whole = profile(model, batch, tmp_path, loss=loss), profile(model, batch, tmp_path, few=False, loss=loss)
    assert few.traced == {"blocks": 6}
    assert few.groups == whole.groups


def test_which_block_stands_for_which() -> None:
    assert repeated_lists(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)]))) == []
    plain = Repeated("h", 96, 0, 1)
    assert plain.least == 3
    assert [plain.source(i, 3) for i in (0, 1, 50, 94, 95)] == [0, 1, 1, 1, 2]
    prefixed = Repeated("h", 9, 1, 2)
    assert prefixed.least == 7
    assert [prefixed.source(i, 7) for i in range(9)] == [0, 1, 2, 3, 4, 3, 4, 5, 6]


def test_checkpointed_blocks_keep_what_crosses_their_borders(tmp_path: Path) -> None:
    model = BUILD["llama"](4)
    batch = sample_batch(model, 2, 12, 1)
    plain = profile(model, batch, tmp_path).groups
    model.gradient_checkpointing_enable()
    found = profile(model, batch, tmp_path).groups
    assert [g.segment for g in found] == [-1, 0, 1, 2, 3]
    for ours, theirs in zip(found[1:], plain[1:], strict=True):
        assert ours.saved_bytes == 2 * 12 * 32 * 4  # the block's output alone
        assert ours.saved_bytes < theirs.saved_bytes
        assert ours.backward_s == pytest.approx(theirs.backward_s + theirs.forward_s)
        assert ours.backward_peak_bytes >= theirs.saved_bytes
    assert model.is_gradient_checkpointing


def test_opt_175b_is_profiled_without_being_in_memory(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    with torch.device("meta"):
        model = OPTForCausalLM(
            OPTConfig(
                num_hidden_layers=96,
                hidden_size=12288,
                ffn_dim=49152,
                num_attention_heads=96,
                word_embed_proj_dim=12288,
                max_position_embeddings=2048,
                use_cache=False,
            )
        ).train()
    ids = torch.zeros(1, 2048, dtype=torch.int64)
    found = profile(model, {"input_ids": ids, "labels": ids}, tmp_path)
    assert len(found.groups) == 97
    assert sum(g.elements for g in found.groups) == sum(p.numel() for p in model.parameters()) > 174e9
    assert found.groups[50].modules == ("model.decoder.layers.49",)
    assert all(p.is_meta for p in model.parameters())
    assert found.trace_s < 60
    assert found.profile_s < 10
