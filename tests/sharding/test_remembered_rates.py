"""What collectives take is measured once for ranks on such devices: later runs plan with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stowage.stages.device.rates.collectives import CollectiveRates
from stowage.stages.runtime.sharding import ranks as ranks_module
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.runtime.sharding.rates import place_of

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path, _no_group: None) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    return dist.group.WORLD


def test_a_later_run_finds_what_an_earlier_one_measured(
    group: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(group: object, device: torch.device) -> CollectiveRates:
        asked.append(device)
        return CollectiveRates(1e9 * len(asked), 1e-4)

    monkeypatch.setattr(ranks_module, "measure_collectives", measured)
    folder = tmp_path / "devices"
    first, again = Ranks(group).rates(CPU, folder), Ranks(group).rates(CPU, folder)
    assert first == again == CollectiveRates(1e9, 1e-4)
    assert len(asked) == 1
    assert Ranks(group).rates(CPU).bytes_per_s == 2e9, "without a folder each run measures"
    (kept,) = folder.iterdir()
    whole = kept.read_text()
    for number, damaged in enumerate(("{", whole.replace("1000000000.0", "0.0"), whole[:-9]), start=3):
        assert damaged != whole
        kept.write_text(damaged)
        assert Ranks(group).rates(CPU, folder).bytes_per_s == number * 1e9, "it is measured again"
        assert Ranks(group).rates(CPU, folder).bytes_per_s == number * 1e9


def test_other_devices_other_places_and_no_names_of_hosts(tmp_path: Path) -> None:
    one = place_of(tmp_path, "gloo", [("a", "x"), ("a", "x")])
    assert place_of(tmp_path, "gloo", [("b", "x"), ("b", "x")]) == one
    others = [[("a", "x"), ("b", "x")], [("a", "x"), ("a", "y")], [("a", "x")] * 3]
    assert (
        len({one, place_of(tmp_path, "nccl", [("a", "x")] * 2), *(place_of(tmp_path, "gloo", o) for o in others)}) == 5
    )
