"""Batches of other lengths: exact, within the budget, and without measuring or searching again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage.flows.planning.costed as costed
import stowage.flows.planning.sizes as sizes
import stowage.flows.planning.step as planning_step
import stowage.stages.options.generate as generate
from stowage.flows import fit
from stowage.stages.ir.errors import Infeasible
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import differences, same


class Tagger(nn.Module):
    """Attention over a sequence, with dropout: what is kept grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.mix = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.mix:
            weights = torch.softmax(x @ x.transpose(1, 2), -1)
            x = x + self.dropout(torch.relu(layer(weights @ x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tags.flatten())


class Pooled(nn.Module):
    """Convolutions over a signal of any length, normalised: buffers change, and nothing is named as above."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Conv1d(8, 8, 3, padding=1)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor) -> Any:
        signal = nn.functional.one_hot(tokens % 3, 3).float().transpose(1, 2)
        return (self.out(self.body(signal).mean(-1)).squeeze(-1) - tags.float().mean(-1)).pow(2).mean()


class Rolled(nn.Module):
    """Kernels that return other layouts and storages than PyTorch's fake ones say, and one that takes probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor, tags: torch.Tensor) -> Any:
        picture = (tokens[:, None, :, None] + torch.arange(6)).remainder(7).float().expand(-1, 3, -1, -1)
        x = self.body(picture.contiguous(memory_format=torch.channels_last)).roll(1, 3)
        x = nn.functional.hardswish(nn.functional.elu(x)).mean((2, 3))
        chance = torch.sigmoid(self.out(x).squeeze(-1))
        target = tags.float().mean(-1) / 10
        return nn.functional.binary_cross_entropy(chance, target) + nn.functional.mse_loss(x.mean(-1), target)


BUDGETS: dict[type[nn.Module], str] = {Rolled: "120%"}
"""Workspaces are most of what it takes."""


def batch_of(length: int, rows: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 30, (rows, length), generator=generator)
    return {"tokens": tokens, "tags": tokens % 5}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Beside:
    """A model under a plan, and one in plain PyTorch."""

    def __init__(self, kind: type[nn.Module], stores: Path, length: int, **how: Any) -> None:
        self.said: list[str] = []
        with seeded(0):
            self.model = kind()
            self.other = kind()
        self.other.load_state_dict(self.model.state_dict())
        self.optimizer = adam(self.other.parameters())
        how = {
            "device_budget": BUDGETS.get(kind, "80%"),
            "cache_dir": stores,
            "quick": True,
            "check": "never",
            "say": self.said.append,
        } | how
        self.step = fit(self.model, batch_of(length), adam, **how)

    def train(self, *lengths: int, rows: int = 4) -> None:
        """A step each, bit for bit, within the budget."""
        for number, length in enumerate(lengths):
            batch = batch_of(length, rows)
            with torch.random.fork_rng():
                torch.manual_seed(number)
                loss = self.other(**batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                state = torch.get_rng_state()
                torch.manual_seed(number)
                self.step.prepare(batch)
                found = self.step.measure(batch)
                assert torch.equal(torch.get_rng_state(), state)
            assert found.loss == float(loss.detach())
            with self.step.on_device():
                assert differences(self.model, self.other) == []
                assert same(self.step.optimizer.state_dict(), self.optimizer.state_dict())  # type: ignore[union-attr]
            plan = self.step.plan
            assert found.peak_bytes <= plan.device_peak_bytes <= plan.device_budget_bytes


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often operations are timed, schedules of blocks looked for, and plans searched: of a size, and in full."""
    found = {"profiles": 0, "options": 0, "solves": 0, "searches": 0}

    def counted(module: Any, name: str, key: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            found[key] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, call)

    counted(costed, "profile_variants", "profiles")
    work = generate.work

    def worked(jobs: Any, workers: int) -> None:
        jobs = list(jobs)
        found["options"] += len(jobs)
        work(jobs, workers)

    monkeypatch.setattr(generate, "work", worked)
    counted(sizes, "solve_variants", "solves")
    counted(planning_step, "solve_variants", "searches")
    return found


@pytest.mark.parametrize("kind", [Tagger, Pooled, Rolled])
def test_a_shorter_batch_that_fits_trains_at_once(
    kind: type[nn.Module], fit_stores: Path, count: dict[str, int]
) -> None:
    beside = Beside(kind, fit_stores, 40)
    count.update(dict.fromkeys(count, 0))
    beside.train(12, 9, 12)
    assert beside.step.plan.method == "keep_all"
    assert set(count.values()) == {0}


@pytest.mark.parametrize("kind", [Tagger, Pooled])
def test_one_that_does_not_fit_reuses_schedules(kind: type[nn.Module], fit_stores: Path, count: dict[str, int]) -> None:
    budget = Beside(kind, fit_stores, 40).step.plan.device_budget_bytes
    beside = Beside(kind, fit_stores, 40, device_budget=budget)
    count.update(dict.fromkeys(count, 0))
    beside.train(39, 38, 40)
    assert count["profiles"] == count["options"] == count["searches"] == 0
    assert beside.step.plan.device_budget_bytes == budget


def test_a_longer_batch_within_bytes_is_not_measured_either(fit_stores: Path, count: dict[str, int]) -> None:
    beside = Beside(Tagger, fit_stores, 16, device_budget="1MiB")
    count.update(dict.fromkeys(count, 0))
    beside.train(24, 32, 20)
    assert count["profiles"] == 0


def test_where_everything_fits_nothing_is_searched_until_it_does_not(fit_stores: Path, count: dict[str, int]) -> None:
    most = Beside(Tagger, fit_stores, 8, device_budget="100%").step.planned.eager_peak_bytes
    count.update(dict.fromkeys(count, 0))
    beside = Beside(Tagger, fit_stores, 8, device_budget=2 * most)
    assert beside.step.plan.method == "keep_all"
    assert count["options"] == count["solves"] == count["searches"] == 0
    beside.train(8, 16)
    assert count["options"] == count["solves"] == count["searches"] == 0
    beside.train(28, 8, 27)
    assert count["searches"] > 0
    assert beside.step.programs.known[0].planned.summary.recomputed_bytes > 0


def test_another_structure_is_still_exact(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 16)
    beside.train(1, 16, 5)
    beside.train(16, 7, rows=1)


def test_estimates_are_not_stored_as_measurements(tmp_path: Path, count: dict[str, int]) -> None:
    beside = Beside(Tagger, tmp_path, 24)
    store = next(path for path in (tmp_path / "costs").glob("*.parquet") if ".returned." not in path.name)
    before = store.read_bytes()
    beside.train(23, 11)
    assert store.read_bytes() == before
    assert beside.step.plan.estimated_nodes > 0


def test_accumulated_lengths(fit_stores: Path, count: dict[str, int]) -> None:
    with seeded(0):
        model, other = Tagger().eval(), Tagger().eval()
    other.load_state_dict(model.state_dict())
    optimizer = adam(other.parameters())
    step = fit(
        model,
        batch_of(24),
        adam,
        device_budget="85%",
        cache_dir=fit_stores,
        quick=True,
        accumulate=2,
        say=lambda _: None,
    )
    count.update(dict.fromkeys(count, 0))
    for lengths in ((24, 9), (9, 10), (8, 24)):
        for number, length in enumerate(lengths):
            batch = batch_of(length)
            loss = other(**batch)
            loss.backward()
            assert float(step(batch, update=number == 1)) == float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        assert differences(model, other) == []
    assert count["profiles"] == 0


def test_lengths_with_states_on_disk(fit_stores: Path, tmp_path: Path, count: dict[str, int]) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

        def forward(self, tokens: torch.Tensor, tags: torch.Tensor) -> Any:
            x = nn.functional.one_hot(tokens, 512).float()
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return (x.mean(-1) - tags).pow(2).mean()

    how: dict[str, Any] = {"method": "offmate", "offload_dir": tmp_path}
    with pytest.raises(Infeasible) as caught:
        Beside(Wide, fit_stores, 12, device_budget=1, **how)
    beside = Beside(Wide, fit_stores, 12, device_budget=int(1.1 * caught.value.smallest_feasible_bytes), **how)
    assert beside.step.planned.slots
    count.update(dict.fromkeys(count, 0))
    beside.train(12, 7, 11)
    assert count["profiles"] == 0
    assert beside.step.planned.slots, "weights stay where they are between steps"
