"""FSDP2's policy of mixed precision: numbers are plain FSDP2's bit for bit, and plans count what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharding.beside_fsdp2 import compared_all
from tests.sharding.processes import on_ranks

CASES = [("gpt2", "bfloat16", 1), ("gpt2", "reduced in float32", 1), ("gpt2", "reduced in float32", 2)]


@pytest.mark.parametrize("name", ["gpt2"])
def test_numbers_are_those_of_plain_fsdp2_in_every_state(name: str, fit_stores: Path) -> None:
    for found in on_ranks(2, compared_all, CASES, fit_stores):
        for case, states in zip(CASES, found, strict=True):
            for state, (losses, wrong) in states.items():
                assert losses and not wrong, (case, state, wrong)
