"""The collectives that `shard` hands to FSDP2 give the numbers of its own, waited for at once or later."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stowage import shard
from stowage.stages.ir.errors import RankError
from stowage.stages.runtime.fsdp import naming
from stowage.stages.runtime.fsdp.collectives import AllGather, ReduceScatter
from stowage.stages.runtime.sharding.failures import Failures
from tests.sharding.beside_ddp import state_of
from tests.sharding.failing_shard import Layers
from tests.sharding.processes import on_ranks

STEPS = 3


def _loss(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def _train(stores: Path, kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """Train with FSDP2's own collectives, with those of gloo, or with those of all other backends."""
    model, batch = Layers(), {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ExitStack() as stack:
        if kind == "own":
            stack.enter_context(mock.patch.object(naming, "WANTED", ("no such method",)))
        if kind == "others":
            stack.enter_context(mock.patch.object(naming, "GlooAllGather", AllGather))
            stack.enter_context(mock.patch.object(naming, "GlooReduceScatter", ReduceScatter))
        shard(
            model, batch, optimizer, device_budget="1GiB", loss=_loss, choices=state_of("mixed"), cache_dir=stores
        )  # fmt: skip
    losses = []
    for _ in range(STEPS):
        block: Any = model.blocks[0]
        handle = block.unshard(async_op=True)
        assert handle is not None
        handle.wait()
        loss = _loss(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole: Any = list(model.parameters())
    return losses, [p.full_tensor().detach() for p in whole]


def _all(stores: Path) -> dict[str, bool]:
    losses, weights = _train(stores, "own")
    found = {}
    for kind in ("gloo", "others"):
        again, there = _train(stores, kind)
        found[kind] = again == losses and all(torch.equal(a, b) for a, b in zip(there, weights, strict=True))
    return found


def test_the_numbers_are_those_of_fsdp2_itself(fit_stores: Path) -> None:
    assert on_ranks(2, _all, fit_stores) == [{"gloo": True, "others": True}] * 2


class _Lost:
    """A collective whose other rank ends before it is waited for."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def test_a_collective_that_is_waited_for_later_has_its_name_then() -> None:
    failures = Failures(None, 3, "begin anew")
    work = AllGather(failures, "the gather of 'weight'").started(_Lost(), torch.device("cpu"))
    said = []
    for _ in range(2):
        try:
            work.wait()
        except RankError as error:
            said.append(str(error))
    text = (
        "Rank 3 waited for the gather of 'weight' when another rank ended or failed: see what that one said last, then"
    )
    assert said == [f"{text} begin anew."] * 2
