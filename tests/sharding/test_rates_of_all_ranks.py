"""Two ranks plan with what each of them gets while both copy and update, measured once and remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import fit
from stowage.flows.api import fit as _fit
from stowage.flows.api.lower_tier import OpenableTier, lower_tier_for
from stowage.flows.api.sharding.machine import ADAMW_BYTES, parallel_machine
from stowage.flows.api.update_rate import with_shares_of_ranks
from stowage.stages.device import device_of
from stowage.stages.device.rates.disk import DiskRates
from stowage.stages.device.rates.host import HostCopies
from stowage.stages.device.rates.shares import HostShares
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.machine import Link
from stowage.stages.ir.parallel import ParallelMachine
from stowage.stages.ir.table import write_record
from stowage.stages.runtime.sharding import ranks as ranks_module
from stowage.stages.runtime.sharding import shares as shares_module
from stowage.stages.runtime.sharding.ranks import Ranks
from tests.cards.attention import CARD
from tests.devices import made_up_cpu
from tests.sharding.processes import on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Asked:
    """Made-up rates of a rank, which count how often they are measured.

    Attributes:
        optimizers: the names of the optimizers whose updates were measured.
        disks: how often a disk was measured.
        fails: the disk is full on the second rank.
    """

    optimizers: list[str]
    disks: int = 0
    fails: bool = False

    def host(
        self, group: Any, device: torch.device, copies: Any, stopwatch: Any, make: Callable[..., Any], dtype: Any
    ) -> HostShares:
        self.optimizers.append(type(make([nn.Parameter(torch.zeros(3, dtype=dtype))])).__name__)
        own = 1.0 + dist.get_rank()
        return HostShares(own * 1e9, own * 2e9, own * 2.5e9, own * 2.8e9, device.type == "cuda")

    def disk(self, folder: str, stopwatch: Any) -> DiskRates:
        self.disks += 1

        def write() -> None:
            if self.fails and dist.get_rank():
                raise OSError(28, "No space left on device")

        stopwatch.seconds(write)
        own = 1.0 + dist.get_rank()
        return DiskRates(own * 3e8, own * 2e8, own * 4e8)


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        machine: the machine that `shard` plans for.
        card: a card's description among the ranks.
        sgd: the same for another optimizer.
        link: the link that `fit` plans with.
        optimizers, disks: what was measured.
        said: what a disk that is full on one rank ends with.
    """

    machine: ParallelMachine
    card: DeviceDescription
    sgd: DeviceDescription
    link: Link
    optimizers: list[str]
    disks: int
    said: str


def _loss(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _find(stores: Path) -> Found:
    stores = stores / str(dist.get_rank())
    model = nn.Linear(8, 8)
    adamw, sgd = (kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD))
    asked, ranks = Asked([]), Ranks(dist.group.WORLD)
    links: list[Link] = []
    card = mock.Mock(**{"fingerprint.return_value": CARD.fingerprint})

    def machine() -> ParallelMachine:
        return parallel_machine(made_up_cpu(), ranks, CPU, device_bytes=1, host_bytes=2, stores=stores)

    def described(optimizer: torch.optim.Optimizer) -> DeviceDescription:
        here = {"device_of": lambda device: card if device == CUDA else device_of(device)}
        with mock.patch.multiple(ranks_module, **here):
            return with_shares_of_ranks(CARD, optimizer, CUDA, stores, ranks, host=True, disk=False)

    def fitted(folder: str) -> Link:
        kept = stores / folder
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(layer.parameters())
        write_record(kept / "devices" / f"{device_of('cpu').fingerprint()}.json", made_up_cpu())
        fit(
            layer, torch.ones(2, 8), optimizer, device_budget="1GiB", loss=_loss, quick=True, cache_dir=kept,
            offload_dir=stores / "lower", group=dist.group.WORLD, say=lambda text: None,
        )  # fmt: skip
        return links[-1]

    def lower_tier(*given: Any, **more: Any) -> OpenableTier | None:
        found = lower_tier_for(*given, **more)
        assert found is not None
        links.append(found.lower_tier.link)
        return found

    copies = {"HostCopies": lambda device: HostCopies(CPU), "give_back": lambda device: None}
    measured = {"measure_host_shares": asked.host, "measure_disk": asked.disk, **copies}
    with (
        mock.patch.multiple(shares_module, **measured),
        mock.patch.object(_fit, "lower_tier_for", lower_tier),
    ):
        found = [machine(), machine(), described(adamw), described(adamw), described(sgd), fitted("a"), fitted("a")]
        optimizers, disks = list(asked.optimizers), asked.disks
        asked.fails = True
        try:
            fitted("b")
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    assert replace(found[0], **_collectives(found[1])) == found[1], "remembered"
    assert found[2] == found[3]
    assert found[5] == found[6]
    return Found(found[0], found[2], found[4], found[5], optimizers, disks, said)


def _collectives(machine: ParallelMachine) -> dict[str, float]:
    """What is measured in each run."""
    return {
        "collective_bytes_per_s": machine.collective_bytes_per_s,
        "collective_latency_s": machine.collective_latency_s,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return on_ranks(2, _find, tmp_path_factory.mktemp("ranks"))


def test_the_machine_of_shard_has_what_all_ranks_get_together(found: list[Found]) -> None:
    """The rates of the first rank, twice: ranks plan with the same numbers."""
    for machine in (one.machine for one in found):
        assert (machine.offload_bytes_per_s, machine.reload_bytes_per_s) == (2e9, 4e9)
        assert machine.duplex_bytes_per_s == 5e9
        assert machine.host_updates_per_s == machine.device_updates_per_s == 2 * 2.8e9 / ADAMW_BYTES
        assert not machine.collectives_share_link


def test_a_cards_lower_tier_has_a_ranks_share(found: list[Found]) -> None:
    for card in (one.card for one in found):
        assert (card.offload_bytes_per_s, card.reload_bytes_per_s, card.duplex_bytes_per_s) == (1e9, 2e9, 2.5e9)
        assert card.cpu_update_bytes_per_s == 2.8e9
        assert card.collectives_share_link
        assert card.flops_per_s == CARD.flops_per_s


def test_each_optimizer_is_measured_once(found: list[Found]) -> None:
    for one in found:
        assert one.optimizers == ["AdamW", "AdamW", "SGD"], "for shard, and for fit with either optimizer"
        assert one.disks == 1
        assert one.sgd == one.card


def test_a_disk_that_ranks_share_gives_each_its_part(found: list[Found]) -> None:
    assert [one.link for one in found] == [Link(2e8, 3e8, 4e8)] * 2


def test_a_full_disk_of_one_rank_is_one_sentence_on_each(found: list[Found]) -> None:
    first, second = (one.said for one in found)
    assert second.startswith("UnwritableError: ")
    assert "No space left" in second
    assert first == f"RankError: Rank 1 failed: {second.removeprefix('UnwritableError: ')}"


def test_a_single_rank_has_all_that_is_there(tmp_path: Path) -> None:
    machine = parallel_machine(CARD, None, CUDA, device_bytes=1, host_bytes=2, stores=tmp_path)
    assert (machine.reload_bytes_per_s, machine.duplex_bytes_per_s) == (
        CARD.reload_bytes_per_s,
        CARD.duplex_bytes_per_s,
    )
    assert machine.host_updates_per_s == CARD.cpu_update_bytes_per_s / ADAMW_BYTES
    assert not machine.collectives_share_link
    cpu = parallel_machine(made_up_cpu(), None, CPU, device_bytes=1, host_bytes=2, stores=tmp_path)
    assert cpu.reload_bytes_per_s == cpu.duplex_bytes_per_s == made_up_cpu().memory_copy_bytes_per_s / 2
    assert not list(tmp_path.iterdir()), "nothing is measured"
