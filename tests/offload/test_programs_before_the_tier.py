"""A program that uses no lower tier, made before another one opens it, still finds what that one leaves there."""

from __future__ import annotations

from pathlib import Path

import torch

from stowage.flows import fit
from tests.api.wide_network import BATCH, adamw, loss_of, network


def test_a_plan_without_a_tier_goes_on_after_one_with_it(fit_stores: Path, tmp_path: Path) -> None:
    first, second = network(), network()
    wide = (torch.cat([BATCH[0]] * 256),)
    step = fit(
        first, BATCH, adamw, loss=loss_of, device_budget="92MiB", offload_dir=tmp_path, method="offmate",
        cache_dir=fit_stores, quick=True, programs=4,
    )  # fmt: skip
    assert step.programs.offloading is None, "the first plan needs no tier"
    optimizer = adamw(second.parameters())
    for i, batch in enumerate((BATCH, wide, BATCH, BATCH, wide, BATCH)):
        for generator_of in (step, None):
            torch.manual_seed(i)
            if generator_of is not None:
                loss = step(batch).item()
                continue
            optimizer.zero_grad()
            expected = loss_of(second(*batch), batch)
            expected.backward()
            optimizer.step()
            assert loss == expected.item()
    assert step.programs.offloading is not None, "the wider batch needs it"
    with step.on_device() as whole:
        assert all(map(torch.equal, whole.parameters(), second.parameters()))
