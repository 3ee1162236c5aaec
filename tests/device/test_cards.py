"""Cards that are described: every entry is plausible and has its sources, and one's own are read or refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from stowage.stages.device.cards import Card, card_named, card_names, read_card
from stowage.stages.ir.errors import ParameterError

WANTED = (
    "rtx-3060",
    "rtx-3080",
    "rtx-3090",
    "rtx-4060-ti",
    "rtx-4070",
    "rtx-4080",
    "rtx-4090",
    "rtx-5090",
    "a10",
    "a40",
)
MORE = ("a100-40gb", "a100-80gb", "l4", "l40s", "h100", "h200", "v100-16gb", "t4")


def test_well_known_cards_are_there() -> None:
    assert {*WANTED, *MORE} <= {*card_names()}


@pytest.mark.parametrize("name", card_names())
def test_each_card_is_plausible_and_has_sources(name: str) -> None:
    card = card_named(name)
    assert any("NVIDIA" in source and "https://" in source for source in card.sources)
    full, half = card.described("float32"), card.described("float16")
    assert 7 << 30 <= full.memory_bytes <= 160 << 30
    assert full.flops_per_s < card.fp32_tflops * 1e12
    assert half.flops_per_s > full.flops_per_s
    assert full.memory_copy_bytes_per_s < card.bandwidth_gb_s * 1e9
    assert 5e9 < full.offload_bytes_per_s < 64e9
    assert full.fingerprint != half.fingerprint
    # A matrix product of a card reads and writes less than it computes: else a number has the wrong unit.
    assert 5 < full.flops_per_s / full.memory_copy_bytes_per_s < 200


@pytest.mark.parametrize("name", card_names())
def test_each_card_says_what_its_numbers_were_compared_with(name: str) -> None:
    card = card_named(name)
    assert card.compared
    assert all("https://" in page for page in card.compared)
    assert {*card.unchecked} <= {f.name for f in fields(Card)}
    said = "\n".join(card.assumptions("float32"))
    assert card.compared[0] in said
    assert ("compared with no page" in said) == bool(card.unchecked)


def test_every_page_is_one_of_a_card() -> None:
    tables = tomllib.loads(resources.files("stowage.stages.device.cards").joinpath("cards.toml").read_text())
    named = {text.partition(" ")[0] for card in tables["cards"].values() for text in card["compared"]}
    assert named == {*tables["pages"]}


def test_names_are_written_as_people_do() -> None:
    assert card_named("NVIDIA GeForce RTX 4090") == card_named("rtx_4090") == card_named("rtx-4090")
    with pytest.raises(ParameterError, match="did you mean rtx-4090"):
        card_named("rtx-4091")


def test_types_without_fast_units_run_as_float32() -> None:
    assert card_named("t4").described("bfloat16").flops_per_s == card_named("t4").described("float32").flops_per_s


OWN = {"name": "Mine", "memory_gib": 8, "bandwidth_gb_s": 200, "fp32_tflops": 10, "half_tflops": 20, "pcie": "4.0 x8"}


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    assert read_card(path).described("float32").memory_bytes == 8 << 30


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"memory_gib": -1}, "memory_gib is -1.0"),
        ({"memory_gib": "8"}, "memory_gib"),
        ({"pcie": "7 x8"}, "pcie is '7 x8'"),
        ({"matmul": 1.5}, "more than all"),
        ({"halves": ["int8"]}, "halves are int8"),
        ({"speed": 1}, "'speed', which is unknown"),
    ],
)
def test_what_is_no_card_is_one_sentence(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**OWN, **change}))
    with pytest.raises(ParameterError, match="does not describe a card") as caught:
        read_card(path)
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "nothing"])
def test_a_file_that_is_not_json_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match="does not describe a card"):
        read_card(path)
    with pytest.raises(ParameterError, match="No such file"):
        read_card(tmp_path / "none.json")
