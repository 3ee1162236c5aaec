"""Recipes around a step: autocast, gradients that wait offloaded, evaluation, saving and going on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from stowage.flows.planning.by_rules import Rules
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.trace import forward_tables, record_forward
from stowage.stages.train.checkpoint import save_checkpoint
from stowage.stages.train.restore import load_checkpoint
from tests.gpu.cases import TRANSFORMERS, Case
from tests.gpu.side_by_side import (
    SEED,
    Planned,
    Schedule,
    a_tier,
    assert_close,
    differences,
    expect_known_failures,
    plain_step,
    plainly,
    planned,
    traced,
)

cpu_updates = partial(Rules.stream_all, cpu_updates=True)


@pytest.mark.parametrize("model", [*TRANSFORMERS, "convolutions", "recurrent"])
@pytest.mark.parametrize("schedule", [Rules.recompute_all, Rules.stream_all], ids=["recompute", "stream"])
def test_autocast(model: str, schedule: Schedule, device: str, request: pytest.FixtureRequest) -> None:
    """Casts are part of the recorded step; eager caches those of weights within a forward."""
    case = Case(model, device, autocast=True)
    expect_known_failures(request, case)
    assert any(v.dtype == "bfloat16" for v in traced(case).trace.values)
    tier = a_tier(device) if schedule is Rules.stream_all else None
    assert differences(planned(case, schedule, tier), plainly(case)) == []


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_gradients_wait_offloaded(where: str, max_grad_norm: float | None, device: str) -> None:
    """Three micro-batches an update: gradients go down after each of the first two, and come back to be added to."""
    case = Case("gpt2" if where == "device" else "llama", device, max_grad_norm=max_grad_norm, micro_batches=3)
    first, middle, last = (traced(case, number).stream_all() for number in range(3))
    assert any(s.role == "gradient" and s.start == "offloaded" for s in middle.slots)
    assert {s.name for s in first.slots if s.role == "gradient"} == {s.name for s in last.slots if s.role == "gradient"}
    if where == "device":
        assert differences(planned(case, Rules.stream_all, a_tier(device)), plainly(case)) == []
    else:
        assert_close(case, planned(case, cpu_updates, a_tier(device)), plainly(case))


def test_evaluation_with_offloaded_weights(device: str) -> None:
    """A forward alone between updates: no dropout, nothing drawn, weights where they were before."""
    case = Case("gpt2", device)
    tier = a_tier(device)
    training = Planned(case, Rules.stream_all, tier)
    model, batches = case.build()
    model.eval()

    def forward(model: torch.nn.Module, batch: object) -> torch.Tensor:
        return case.loss(model, batch)  # type: ignore[arg-type]

    beside = [s for s in traced(case).trace.storages if s.role == "state"]
    tables = forward_tables(record_forward(model, batches[0], forward), model, beside)
    alone = Rules(tables)
    program = alone.program(alone.stream_all(), training.model, None, training.offloading)
    optimizer = case.optimizer(model.parameters())
    assert training.offloading is not None
    for number in range(3):
        model.eval()
        with torch.no_grad():
            expected = case.loss(model, batches[0])
        program.enter()
        offloaded = set(training.offloading.offloaded().values())
        assert any("::" in name for name in offloaded) == (number > 0), "states are offloaded from the first update on"
        torch.manual_seed(number)
        [found] = program.forward(batches[0])
        after = torch.rand(2, device=device)
        torch.manual_seed(number)
        assert torch.equal(after, torch.rand(2, device=device)), "it draws random numbers"
        assert torch.equal(found, expected)
        assert set(training.offloading.offloaded().values()) == offloaded != set()
        torch.manual_seed(SEED + number)
        losses = training.step()
        torch.manual_seed(SEED + number)
        assert losses == plain_step(case, model.train(), optimizer, batches)
    tier.close()


@pytest.mark.parametrize("schedule", [Rules.stream_all, cpu_updates], ids=["device", "cpu"])
def test_saved_and_gone_on_with(schedule: Schedule, device: str, tmp_path: Path) -> None:
    """From a file the rest of a run gives the numbers that it gave without, random ones too."""
    case = Case("gpt2", device)
    tier = a_tier(device)
    training = Planned(case, schedule, tier)
    torch.manual_seed(SEED)
    start = training.step() + training.step()
    file = tmp_path / "checkpoint.safetensors"
    contents = Contents(training.model, training.optimizer, training.offloading)
    save_checkpoint(file, "a run", 2, contents, None, [])
    whole = training.trained([*start, *training.step(), *training.step()])
    tier.close()

    tier = a_tier(device)
    again = Planned(case, schedule, tier)
    torch.manual_seed(17)
    again.step()  # it has states of its own, and offloaded weights
    resumed = load_checkpoint(file, "a run", Contents(again.model, again.optimizer, again.offloading), None)
    assert resumed is not None
    assert resumed.iteration == 2
    assert differences(again.trained([*start, *again.step(), *again.step()]), whole) == []
    tier.close()
