"""Ranks train the same units: rank 0 chooses, from how far all shards moved, and checkpoints go on from there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stowage.flows import Freeze, TrainingStep, fit
from stowage.stages.ir.errors import StowageError
from tests.sharding.processes import on_ranks

ILS = Freeze(0.6, "ils")


def model_of() -> nn.Module:
    """Layers of odd widths, so that shards are padded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(33, 33), nn.GELU(), nn.Dropout(0.1))]
        return nn.Sequential(*layers, nn.Linear(33, 1)).train()


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 33, generator=torch.Generator().manual_seed(number))


def loss_of(outputs: torch.Tensor, _batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def stepped(stores: Path, freeze: Freeze, group: Any = None) -> TrainingStep:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fit(
        model, batch(0), optimizer, device_budget="1GiB", loss=loss_of, cache_dir=stores, quick=True, group=group,
        freeze=freeze, say=lambda text: None,
    )  # fmt: skip


def train(step: TrainingStep, begin: int, end: int) -> list[float]:
    return [step(batch(100 * i + (dist.get_rank() if dist.is_initialized() else 0))).item() for i in range(begin, end)]


def chosen(step: TrainingStep) -> dict[str, Any]:
    """What a checkpoint holds of what is frozen, and what trains next."""
    assert step.frozen is not None
    schedule = step.frozen.schedule
    return {**schedule.state_dict(), "next": sorted(schedule.policy.choose(schedule.step, schedule.dynamics.all()))}


def weights(step: TrainingStep) -> dict[str, torch.Tensor]:
    with step.on_device() as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _moved(stores: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The state after five steps, and the distances of the last as whole weights give them."""
    step = stepped(stores, ILS, dist.group.WORLD)
    train(step, 0, 4)
    before, next_ones = weights(step), chosen(step)["next"]
    train(step, 4, 5)
    after = weights(step)
    assert step.frozen is not None
    found = {}
    for unit in step.frozen.schedule.freezable.units:
        parts = [(after[n] - before[n], before[n]) for n in unit.parameters]
        moved, size = (sum(float(pair[i].double().abs().sum()) for pair in parts) for i in (0, 1))
        assert bool(moved) == (unit.name in next_ones)
        if moved:
            found[unit.name] = moved / size
    return chosen(step), found


@pytest.mark.long
def test_all_ranks_know_how_far_whole_units_moved(fit_stores: Path) -> None:
    (state, expected), other = on_ranks(2, _moved, fit_stores)
    assert (state, expected) == other
    assert 0 < len(expected) < len(state["dynamics"])
    for name, distance in expected.items():
        assert state["dynamics"][name] == pytest.approx(distance, rel=1e-5)


class Own:
    """A policy of a user that chooses something else on each rank, and counts."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, step: int, dynamics: Mapping[str, float]) -> Collection[str]:
        self.asked += 1
        if step == 3:
            raise ValueError("no choice")
        return [list(dynamics)[dist.get_rank()]]

    def most_active(self, units: int) -> int:
        return 1 + dist.get_rank()


def _apart(stores: Path) -> tuple[int, int, list[str], list[str]]:
    policy = Own()
    step = stepped(stores, Freeze(policy=policy), dist.group.WORLD)
    before = weights(step)
    train(step, 0, 3)
    after = weights(step)
    said = []
    for _ in range(2):  # nothing is broken by it
        try:
            train(step, 3, 4)
        except ValueError as error:
            said.append(str(error))
    return policy.asked, step.plan.active_units, [n for n in after if not torch.equal(after[n], before[n])], said


def test_what_rank_0_chooses_trains_on_all(fit_stores: Path) -> None:
    first, second = on_ranks(2, _apart, fit_stores)
    assert first[0] == 5
    assert second[0] == 0
    assert first[1:] == second[1:] == (1, ["0.weight"], ["no choice"] * 2)


def _given(stores: Path) -> str:
    try:
        stepped(stores, Freeze(0.6 if dist.get_rank() else 0.5), dist.group.WORLD)
    except StowageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_that_are_to_freeze_otherwise_say_so(fit_stores: Path) -> None:
    first, second = on_ranks(2, _given, fit_stores)
    assert first == second
    assert first.startswith("RankError: Rank 1 has another freeze than rank 0: 'ils at 0.6, units saving")


def _saved(stores: Path, folder: Path) -> tuple[Any, ...]:
    step = stepped(stores, ILS, dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    train(step, 0, 4)
    step.save(folder / "checkpoint")
    saved = chosen(step)
    return saved, train(step, 4, 8), chosen(step)


def _resumed(stores: Path, folder: Path) -> tuple[Any, ...]:
    step = stepped(stores, ILS, dist.group.WORLD)
    train(step, 20, 21)
    step.load(folder / "checkpoint")
    loaded = chosen(step)
    return loaded, train(step, 4, 8), chosen(step)


@pytest.mark.long
def test_checkpoints_go_on(fit_stores: Path, tmp_path: Path) -> None:
    """As many ranks have the losses of a run that was not interrupted; others, and one process, the same choice next,
    and after that losses that differ by their batches."""
    run = on_ranks(2, _saved, fit_stores, tmp_path)
    assert run[0][0] == run[1][0]
    assert on_ranks(2, _resumed, fit_stores, tmp_path) == run
    for loaded, losses, _ in on_ranks(3, _resumed, fit_stores, tmp_path):
        assert loaded == run[0][0]
        assert len(losses) == 4
    step = stepped(fit_stores, ILS)
    step.load(tmp_path / "checkpoint")
    assert chosen(step) == run[0][0]
    before = weights(step)
    step(batch(400))
    moved = {n for n, w in weights(step).items() if not torch.equal(w, before[n])}
    units = step.frozen.schedule.freezable.units if step.frozen is not None else ()
    assert moved == {n for unit in units if unit.name in run[0][0]["next"] for n in unit.parameters}
    step.save(tmp_path / "one")
    assert [loaded for loaded, _, _ in on_ranks(2, _from_one, fit_stores, tmp_path)] == [chosen(step)] * 2


def _from_one(stores: Path, folder: Path) -> tuple[Any, ...]:
    step = stepped(stores, ILS, dist.group.WORLD)
    step.load(folder / "one")
    loaded = chosen(step)
    return loaded, train(step, 0, 2), chosen(step)
