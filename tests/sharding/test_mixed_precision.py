"""FSDP2's policy of mixed precision: numbers are plain FSDP2's bit for bit, and plans count what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from stowage import ShardPlan, shard
from stowage.flows.api.sharding.precision import as_computed
from stowage.flows.api.sharding.profile import profile_groups
from stowage.flows.benchmarks.papers.machines import MACHINES
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.parallel import ParameterGroup
from tests.matrix import some
from tests.sharding.beside_ddp import MODELS
from tests.sharding.beside_fsdp2 import POLICIES, adamw, compared_all, plain_fsdp2, sharded
from tests.sharding.processes import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "policy", "accumulate"),
    some(
        [
            ("gpt2", "reduced in float32", 2),
            ("gpt2", "bfloat16", 1),
            ("gpt2", "reduced in float32", 1),
            ("gpt2", "reduced in bfloat16 alone", 1),
            ("gpt2", "outputs in float32", 1),
            ("tied", "outputs in float32", 1),
            ("gpt2_untied", "bfloat16", 2),
            ("llama", "reduced in float32", 1),
            ("llama_lora", "bfloat16", 1),
            ("llama_checkpointed", "bfloat16", 1),
            ("t5", "reduced in float32", 1),
            ("vit", "bfloat16", 1),
        ],
        keep=[("gpt2", "bfloat16", 1)],
    ),
)
def test_numbers_are_those_of_plain_fsdp2_in_every_state(
    name: str, policy: str, accumulate: int, fit_stores: Path
) -> None:
    for (found,) in on_ranks(2, compared_all, [(name, policy, accumulate)], fit_stores):
        for state, (losses, wrong) in found.items():
            assert losses, state
            assert not wrong, state


@pytest.mark.usefixtures("_no_group")
def test_one_rank_on_which_everything_fits_computes_in_the_types_of_the_policy(fit_stores: Path) -> None:
    model, batch, _ = MODELS["gpt2"]()
    optimizer = adamw(model)
    plan = shard(model, batch, optimizer, device_budget="1GiB", mixed_precision=BF16, cache_dir=fit_stores)
    assert not plan.whole
    assert not any(choice.on_host for choice in plan.choices)
    assert "over 1 rank\n" in str(plan)
    assert model(**batch).logits.dtype == torch.bfloat16
    model(**batch).loss.backward()
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    losses, expected = plain_fsdp2("gpt2", BF16)
    for state in ("device, keep", "host, reshard"):
        ours, trained = sharded("gpt2", BF16, state, fit_stores)
        assert ours == losses
        assert all(torch.equal(trained[name], expected[name]) for name in expected)
    assert losses != plain_fsdp2("gpt2", MixedPrecisionPolicy())[0]


@pytest.mark.usefixtures("_no_group")
def test_a_plan_says_its_policy_and_keeps_it_in_its_text(fit_stores: Path) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, cast_forward_inputs=False)
    model, batch, _ = MODELS["gpt2"]()
    before = {name: (id(p), id(m)) for m in model.modules() for name, p in m.named_parameters(recurse=False)}
    given: dict[str, Any] = {"device_budget": "1GiB", "cache_dir": fit_stores}
    stored = shard(model, batch, adamw(model), **given)
    assert "mixed_precision" not in stored.to_json()
    assert "mixed precision" not in str(stored)
    assert ShardPlan.from_json(stored.to_json()) == stored
    assert {name: (id(p), id(m)) for m in model.modules() for name, p in m.named_parameters(recurse=False)} == before
    plan = shard(model, batch, adamw(model), mixed_precision=policy, **given)
    assert plan.mixed_precision == policy
    assert (
        "mixed precision: weights gathered in bfloat16, gradients reduced in float32, outputs in float16, inputs as "
        "they are" in str(plan)
    )
    again = ShardPlan.from_json(plan.to_json())
    assert again == plan
    assert again.content_hash == plan.content_hash != replace(plan, mixed_precision=BF16).content_hash


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.bfloat16, "mixed_precision is a dtype: give a MixedPrecisionPolicy of torch.distributed.fsdp, or None."),
        ("bf16", "mixed_precision is a str: give"),
        (MixedPrecisionPolicy("bf16"), "mixed_precision has param_dtype='bf16': give a floating-point type"),  # type: ignore[arg-type]
        (MixedPrecisionPolicy(reduce_dtype=torch.int8), "has reduce_dtype=torch.int8: give a floating-point type"),
        (MixedPrecisionPolicy(cast_forward_inputs=3), "has cast_forward_inputs=3: give True or False"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_policy_is_refused(given: Any, said: str, fit_stores: Path) -> None:
    model, batch, _ = MODELS["gpt2"]()
    with pytest.raises(ParameterError, match=said):
        shard(model, batch, device_budget="1GiB", mixed_precision=given, cache_dir=fit_stores)


def rows(model: nn.Module, batch: Any, folder: Path, policy: MixedPrecisionPolicy | None) -> list[ParameterGroup]:
    target = MACHINES["RTX 3090"].device
    loss = None if hasattr(model, "config") else lambda outputs, _: outputs.float().sum()
    found = profile_groups(
        model, batch, stores=folder, optimizer=adamw(model), target=target, loss=loss, mixed_precision=policy
    )
    return list(found.groups)


def test_a_profile_has_the_bytes_of_the_policy(tmp_path: Path) -> None:
    model, batch, _ = MODELS["gpt2"]()
    half, _, _ = MODELS["gpt2_bf16"]()
    stored, traced = rows(model, batch, tmp_path, None), rows(half, batch, tmp_path, None)
    found = rows(model, batch, tmp_path, BF16)
    reduced = rows(model, batch, tmp_path, POLICIES["reduced in float32"])
    largest = max(p.numel() for p in model.transformer.h[0].parameters())
    assert found[1].largest_cast == largest
    assert found[1].update_bytes == 2 * 4 * largest
    plain: dict[str, Any] = {"stored_bytes": 2, "state_bytes": 4}
    plain |= {"reduce_bytes": 0, "casts_gradients": False, "largest_cast": 0, "update_bytes": 0}
    for ours, full, lower, other in zip(found, stored, traced, reduced, strict=True):
        assert (ours.stored_bytes, ours.compute_bytes, ours.reduced_bytes, ours.state_bytes) == (4, 2, 2, 8)
        assert (other.reduced_bytes, other.casts_gradients) == (4, False)
        assert ours.casts_gradients
        # A model in bfloat16 computes the same; but there equal masks of forward count as one.
        forward = {name: getattr(lower, name) for name in ("forward_s", "forward_peak_bytes", "entering_bytes")}
        assert replace(ours, **plain, **forward) == lower
        assert abs(lower.forward_peak_bytes - ours.forward_peak_bytes) < 1024
        assert abs(lower.entering_bytes - ours.entering_bytes) < 1024
        assert ours.saved_bytes < full.saved_bytes
    of_half = rows(half, batch, tmp_path, BF16)
    assert not any(g.casts_gradients or g.largest_cast for g in of_half)
    assert [(g.stored_bytes, g.state_bytes, g.saved_bytes) for g in of_half] == [
        (g.stored_bytes, g.state_bytes, g.saved_bytes) for g in traced
    ]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Scaled(nn.Module):
    """Blocks that are handed a mask of floating-point numbers, which is a buffer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> Any:
            assert x.dtype == mask.dtype
            return torch.tanh(self.inside(x * mask))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64))
        self.blocks = nn.ModuleList(Scaled.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x, mask=self.mask)
        return x


def test_what_enters_a_group_is_cast_and_buffers_are_not(tmp_path: Path) -> None:
    model = Scaled()
    with as_computed(model, BF16, [f"blocks.{i}" for i in range(4)]) as layouts:
        assert {layout.dtype for layout in layouts.values()} == {torch.bfloat16}
        assert model.blocks[0](torch.ones(2, 64), mask=model.mask).dtype == torch.bfloat16
        assert model.mask.dtype == torch.float32
    batch = {"x": torch.ones(8, 64)}
    saved = {policy: [g.saved_bytes for g in rows(model, batch, tmp_path, policy)[1:]] for policy in (None, BF16)}
    mask = 64 * 2  # each block's own copy, for the gradient of what it reads
    assert saved[BF16] == [nbytes // 2 + (mask if i else 0) for i, nbytes in enumerate(saved[None])]


def test_a_model_without_weights_in_memory_is_profiled_in_the_types_of_the_policy(tmp_path: Path) -> None:
    model, batch, _ = MODELS["gpt2"]()
    expected = rows(model, batch, tmp_path, BF16)
    model.to("meta")
    model.tie_weights()
    assert rows(model, batch, tmp_path, BF16) == expected
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
