"""Rates of collectives: measured among processes, kept in the device's description, used for so many ranks alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stowage.stages.device.__main__ import TARGET, main
from stowage.stages.device.rates import collectives
from stowage.stages.device.rates.collectives import CollectiveRates, measure_ranks
from stowage.stages.device.rates.disk import DiskRates
from stowage.stages.device.rates.shares import with_shares
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import read_record


def test_two_processes_exchange_data() -> None:
    found = measure_ranks("cpu", 2)
    assert 1e6 < found.bytes_per_s < 1e12
    assert 0 < found.start_s < 10


def test_the_description_says_among_how_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stowage.stages.device.__main__.measure_ranks", lambda kind, n: CollectiveRates(n * 1e9, 1e-4))
    shares = None, DiskRates(read_bytes_per_s=3e8, write_bytes_per_s=2e8, duplex_bytes_per_s=4e8)
    monkeypatch.setattr("stowage.stages.device.__main__.shares_of_processes", lambda kind, n, folder: shares)

    def described(*words: str) -> DeviceDescription:
        monkeypatch.setattr(sys, "argv", ["device", "cpu", *words])
        assert main() == 0
        return read_record(TARGET, DeviceDescription)

    alone = described()
    assert alone.collective_bytes_per_s == 0
    two = described("--ranks", "2")
    assert two == with_shares(
        replace(alone, collective_bytes_per_s=2e9, collective_s=1e-4, collective_ranks=2), *shares
    )
    assert described() == two, "nothing is measured again"
    old = {name: value for name, value in json.loads(TARGET.read_text()).items() if "share" not in name}
    TARGET.write_text(json.dumps(old))
    assert read_record(TARGET, DeviceDescription).collective_ranks == 2, "one of an earlier version is read"
    assert described("--ranks", "2") == two, "and measured anew"
    assert described("--ranks", "4").collective_ranks == 4
    assert two.among(1) == alone, "a step on one rank is planned as if there were no others"
    assert two.among(2).disk_read_bytes_per_s == 3e8


def test_more_ranks_than_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ParameterError, match="this machine has 1"):
        measure_ranks("cuda", 2)
