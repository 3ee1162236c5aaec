"""Sharded training gives the numbers of DDP on the same batches, bit for bit, in every state of the groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import some
from tests.sharding.ranks import run_on_ranks

pytest.importorskip("peft", reason="peft is not installed")

STATES = 5
BLOCKS = {"gpt2": 3, "t5": 4, "resnet": 2, "llama_lora": 2}
A_HUNDREDTH = 1e-4
"""T5's encoded source is read twice by every block of the decoder. FSDP2 adds the two gradients of a block first, DDP
adds one after the other, so that gradients differ by rounding; weights then differ by less than a hundredth of one
AdamW update, whose rate is 0.01. Under DDP with sums in the same order they are equal bit for bit (`grouped`)."""

A_ROUNDING = 2**-7
"""SGD's kernel for bfloat16 rounds the last elements of a tensor otherwise than the others, so that shards whose length
is no multiple of a block differ from the whole in the last of 8 bits."""


@pytest.mark.parametrize(
    "name",
    some(
        ["gpt2", "llama_lora", "t5", "resnet", "gpt2_bf16", "gpt2_frozen", "gpt2_untied", "tied", "transformer", "unet",
         "batchnorm", "llama", "llama_checkpointed", "vit"],
        keep=["gpt2"],
    ),
)  # fmt: skip
def test_every_state_and_both_optimizers(name: str, fit_stores: Path) -> None:
    results: list[dict[str, Any]] = run_on_ranks(
        "tests.sharding.beside_ddp", str(fit_stores), f"adamw:{name}", f"sgd:{name}"
    )
    assert len(results) == 2 * 2 * STATES
    for result in results:
        if result["case"] == "sgd:gpt2_bf16":
            assert max(result["wrong"].values(), default=0.0) < A_ROUNDING, result
            assert result["warned"] is not False, result
            continue
        assert result["grouped"], result
        assert not result["warned"], result
        assert len(result["groups"]) > 1
        assert result["groups"][0] == ""
        if name in BLOCKS:
            assert len(result["groups"]) == 1 + BLOCKS[name], result
        if name == "t5":
            assert max(result["wrong"].values(), default=0.0) < A_HUNDREDTH, result
        else:
            assert result["losses"], result
            assert not result["wrong"], result


def test_every_state_with_lion(fit_stores: Path) -> None:
    """An optimizer of a user's own, whose signs would make a whole step of a gradient's last bit."""
    results: list[dict[str, Any]] = run_on_ranks("tests.sharding.beside_ddp", str(fit_stores), "lion:gpt2")
    assert len(results) == 2 * STATES
    for result in results:
        assert result["losses"], result
        assert not result["wrong"], result
        assert not result["warned"], result
