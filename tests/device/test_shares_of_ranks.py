"""What one rank gets of the host and of a disk while all ranks use them: as much as the slowest gets, on all ranks."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stowage.stages.device.rates import at_once, collectives, shares
from stowage.stages.device.rates.at_once import ALONE, RanksStopwatch
from stowage.stages.device.rates.collectives import collectives_wait_for, shares_link
from stowage.stages.device.rates.disk import DiskRates
from stowage.stages.device.rates.host import BYTES_ON_CPU, ELEMENTS_ON_CPU, HostCopies
from stowage.stages.device.rates.shares import HostShares, measure_host_shares, with_shares
from stowage.stages.ir.costs import DeviceDescription
from tests.cards.attention import CARD
from tests.devices import made_up_cpu
from tests.sharding.processes import on_ranks

CPU = torch.device("cpu")
HOST = HostShares(1e9, 2e9, 2.5e9, 3e9, collectives_share_link=True)
DISK = DiskRates(read_bytes_per_s=3e8, write_bytes_per_s=2e8, duplex_bytes_per_s=4e8)


class _Clock:
    """A clock on which each piece of work takes as many seconds as the rank's number, from one on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0 + dist.get_rank()
        return self.now_s


@dataclass(frozen=True)
class _Measured:
    """What one of two ranks has measured.

    Attributes:
        shares: its shares of the host, on a clock of its own.
        came_s, began_s: when it came, and when its work began, on a clock that all processes of a machine have.
        failing_s: seconds of work that fails on the second rank.
        said: its own error.
    """

    shares: HostShares
    came_s: float
    began_s: float
    failing_s: float
    said: str


def _measure() -> _Measured:
    stopwatch = RanksStopwatch(None, CPU)
    with mock.patch.object(at_once.time, "perf_counter", _Clock()):
        found = measure_host_shares(None, CPU, HostCopies(CPU), stopwatch)
    time.sleep(0.3 * dist.get_rank())
    came_s, began = time.monotonic(), list[float]()
    stopwatch.seconds(lambda: began.append(time.monotonic()))
    stopwatch.check()
    failing_s = stopwatch.seconds(lambda: 1 // (1 - dist.get_rank()))
    stopwatch.seconds(lambda: None)  # nobody waits for the rank that has failed
    try:
        stopwatch.check()
        said = ""
    except ZeroDivisionError as error:
        said = str(error)
    return _Measured(found, came_s, began[0], failing_s, said)


@pytest.fixture(scope="module")
def measured() -> list[_Measured]:
    return on_ranks(2, _measure)


def test_all_ranks_have_the_share_of_the_slowest(measured: list[_Measured]) -> None:
    first, second = (one.shares for one in measured)
    assert first == second
    assert (first.offload, first.reload, first.duplex) == (BYTES_ON_CPU / 2, BYTES_ON_CPU / 2, BYTES_ON_CPU)
    assert first.update == pytest.approx(28 * ELEMENTS_ON_CPU / 2, rel=1e-3)
    assert not first.collectives_share_link, "a CPU has no such link"


def test_no_rank_begins_before_the_last_is_there(measured: list[_Measured]) -> None:
    assert min(one.began_s for one in measured) >= max(one.came_s for one in measured)


def test_what_fails_on_one_rank_is_known_to_all(measured: list[_Measured]) -> None:
    assert [one.failing_s for one in measured] == [math.inf] * 2
    assert [one.said for one in measured] == ["", "integer division or modulo by zero"]


def test_a_process_alone_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 4.0])
    monkeypatch.setattr(at_once.time, "perf_counter", lambda: next(ticks))
    order: list[str] = []
    assert ALONE.seconds(lambda: order.append("work"), lambda: order.append("beside")) == 3.0
    assert order == ["beside", "work"]


def test_a_link_is_shared_where_gathers_beside_copies_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares_link(1.0, 2.0)
    assert not shares_link(1.0, 1.0)
    assert not shares_link(1.0, 1.2), "noise"
    copying: list[str] = []

    def time_s(group: object, device: torch.device, nbytes: int, beside: object = None) -> float:
        if beside is not None:
            copying.append("copies")
        return 2.0 if beside is not None else 1.0

    monkeypatch.setattr(collectives, "_time_s", time_s)
    assert collectives_wait_for(None, CPU, lambda: None)
    assert copying == ["copies"]


@pytest.mark.parametrize("shared", [True, False])
def test_only_a_card_is_asked_what_its_link_carries(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No card is here: what is copied to and from one is copied in RAM, by the same calls."""

    def asked(group: object, device: torch.device, copies: object) -> bool:
        return shared

    monkeypatch.setattr(shares, "collectives_wait_for", asked)
    found = measure_host_shares(None, torch.device("cuda", 0), HostCopies(CPU), at_once.Stopwatch())
    assert found.collectives_share_link == shared
    assert not measure_host_shares(None, CPU, HostCopies(CPU), at_once.Stopwatch()).collectives_share_link


def test_several_ranks_plan_with_their_shares_and_one_with_all() -> None:
    measured = with_shares(replace(CARD, collective_bytes_per_s=1e9, collective_s=1e-5, collective_ranks=2), HOST, DISK)
    two = measured.among(2)
    assert (two.offload_bytes_per_s, two.reload_bytes_per_s, two.duplex_bytes_per_s) == (1e9, 2e9, 2.5e9)
    assert two.cpu_update_bytes_per_s == 3e9
    assert (two.disk_read_bytes_per_s, two.disk_write_bytes_per_s, two.disk_duplex_bytes_per_s) == (3e8, 2e8, 4e8)
    assert two.collectives_share_link
    assert measured.among(1) == CARD
    assert measured.knows(2)
    assert measured.knows(1)
    assert not measured.knows(4)
    old = replace(CARD, collective_bytes_per_s=1e9, collective_s=1e-5, collective_ranks=2)
    assert old.among(2) is old, "a description from before ranks were measured at once"
    assert not old.knows(2)


def test_a_cpu_has_shares_of_its_disk_alone() -> None:
    cpu: DeviceDescription = with_shares(made_up_cpu(), disk=DISK).among(2)
    assert cpu.disk_read_bytes_per_s == 3e8
    assert (cpu.offload_bytes_per_s, cpu.cpu_update_bytes_per_s) == (0.0, 0.0)


def _disk_of_ranks(folder: Path) -> DiskRates:
    with mock.patch.object(at_once.time, "perf_counter", _Clock()):
        return shares._disk_as_one(str(folder), CPU)


@pytest.mark.long
def test_a_disk_is_measured_by_all_at_once(tmp_path: Path) -> None:
    first, second = on_ranks(2, _disk_of_ranks, tmp_path)
    assert first == second == DiskRates(2**26, 2**26, 2**27)
