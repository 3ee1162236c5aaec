"""Each group asks for the next ones ahead of their use, in forward and backwards in backward, as it would on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from stowage import shard
from stowage.stages.runtime.fsdp.gloo import GlooAllGather
from tests.sharding.beside_ddp import state_of
from tests.sharding.failing_shard import Layers
from tests.sharding.processes import on_ranks

Lists = dict[str, list[str]]
"""By the path of a module, the paths of those that it asks for."""


def _loss(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _asked(model: Layers, stores: Path, **more: Any) -> tuple[Lists, Lists]:
    """Shard a model, and return what its modules ask for in forward and in backward."""
    found: dict[str, dict[FSDPModule, list[FSDPModule]]] = {"forward": {}, "backward": {}}
    real = {way: getattr(FSDPModule, f"set_modules_to_{way}_prefetch") for way in found}

    def noting(way: str) -> Any:
        def note(module: FSDPModule, modules: list[FSDPModule]) -> None:
            found[way][module] = list(modules)
            real[way](module, modules)

        return note

    with (
        mock.patch.object(FSDPModule, "set_modules_to_forward_prefetch", noting("forward")),
        mock.patch.object(FSDPModule, "set_modules_to_backward_prefetch", noting("backward")),
    ):
        batch = {"x": torch.zeros(8, 6)}
        choose = state_of("host, reshard")  # one rank on whose device everything is stays as it is
        shard(model, batch, device_budget="1GiB", loss=_loss, choices=choose, cache_dir=stores, **more)
    paths: dict[Any, str] = {module: path for path, module in model.named_modules()}
    lists = [{paths[m]: [paths[n] for n in asked] for m, asked in found[way].items()} for way in found]
    return lists[0], lists[1]


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("ahead", "forward", "backward"),
    [
        (
            1,
            {"": [0], 0: [1], 1: [2], 2: [2]},
            {"": [2], 2: [1], 1: [0], 0: [0]},
        ),
        (
            2,
            {"": [0, 1], 0: [1, 2], 1: [2], 2: [2]},
            {"": [2, 1], 2: [1, 0], 1: [0], 0: [0]},
        ),
        (
            0,
            {0: [0], 1: [1], 2: [2]},
            {"": [""], 0: [0], 1: [1], 2: [2]},
        ),
    ],
)
def test_each_group_asks_for_the_next(
    ahead: int, forward: dict[Any, list[Any]], backward: dict[Any, list[Any]], device: str, fit_stores: Path
) -> None:
    """A module that asks for itself asks for nothing: an empty list would leave the choice to PyTorch."""
    with torch.device(device):
        model = Layers()
    found = _asked(model, fit_stores, prefetch=ahead)

    def paths(lists: dict[Any, list[Any]]) -> Lists:
        def path(block: Any) -> str:
            return f"blocks.{block}" if block != "" else ""

        return {path(block): [path(other) for other in asked] for block, asked in lists.items()}

    assert found == (paths(forward), paths(backward))


@pytest.mark.usefixtures("_no_group")
def test_on_a_cpu_nothing_is_asked_for_unless_one_says_so(fit_stores: Path) -> None:
    assert _asked(Layers(), fit_stores) == _asked(Layers(), fit_stores / "again", prefetch=0)


def _order(stores: Path, ahead: int) -> list[str]:
    """Return what begins in a step: gathers of blocks, and forwards and backwards of blocks."""
    model = Layers()
    _asked(model, stores, prefetch=ahead)
    began: list[str] = []
    real = GlooAllGather.gather

    def gather(self: GlooAllGather, *arguments: Any) -> Any:
        began.append(f"gather {self.what.split(chr(39))[1].removesuffix('.0.weight')}")
        return real(self, *arguments)

    for number, block in enumerate(model.blocks):
        inner: Any = block[1]  # type: ignore[index]
        inner.register_forward_hook(lambda *_, number=number: began.append(f"forward blocks.{number}"))
        inner.register_full_backward_hook(lambda *_, number=number: began.append(f"backward blocks.{number}"))
    with mock.patch.object(GlooAllGather, "gather", gather):
        _loss(model(torch.randn(8, 6)), None).backward()
    return [what for what in began if "blocks" in what]


def _orders(stores: Path) -> dict[int, list[str]]:
    return {ahead: _order(stores, ahead) for ahead in (0, 1)}


def test_a_gather_begins_while_the_group_before_computes(fit_stores: Path) -> None:
    first, second = on_ranks(2, _orders, fit_stores)
    assert first == second
    forward = [f"{verb} blocks.{i}" for i in range(3) for verb in ("gather", "forward")]
    backward = [f"{verb} blocks.{i}" for i in (2, 1, 0) for verb in ("gather", "backward")]
    assert first[0] == forward + backward
    early = ["gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"]
    late = ["gather 2", "gather 1", "backward 2", "gather 0", "backward 1", "backward 0"]
    assert first[1] == [f"{what[:-1]}blocks.{what[-1]}" for what in early + late]
