"""`fit(…, executor=…)`: another executor sees every verb of a step; it is one class, which `fit` is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import Offload, fit
from stowage.stages.device.tiers import Tier
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.executors.base import ExecutablePlan, Executor
from stowage.stages.runtime.executors.iteration import SingleIteration
from stowage.stages.runtime.executors.single import SingleDevice
from stowage.stages.runtime.executors.verbs import AROUND, CONDITIONS, VERBS, Iteration
from stowage.stages.runtime.offload.contents import Contents
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.structure.tree import ModuleTree
from tests.api.wide_network import BATCH, adamw, loss_of, network


class Noted:
    """Hands every verb on, and notes its name."""

    def __init__(self, run: SingleIteration, verbs: list[str]) -> None:
        self._run = run
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        if name in VERBS | AROUND:
            self._verbs.append(name)
        return getattr(self._run, name)


class Recording:
    """An executor that shares nothing with `SingleDevice`: it holds all the verbs that its steps called."""

    made: list[Recording]

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        open_tier: Callable[[], Tier] | None = None,
        tree: ModuleTree | None = None,
    ) -> None:
        del tree
        self._model, self._optimizer, self._open_tier = model, optimizer, open_tier
        self.offloading: Offloading | None = None
        self.verbs: list[str] = []
        self.made.append(self)

    def layouts(self) -> dict[str, torch.Tensor]:
        return {}

    def lend(self, names: Iterable[str] | None) -> AbstractContextManager[None]:
        return self._lent(names)

    @contextmanager
    def _lent(self, names: Iterable[str] | None) -> Iterator[None]:
        here = self.offloading.fetch_all(names) if self.offloading is not None else []
        yield
        if self.offloading is not None:
            self.offloading.forget_copies(here)

    def tracing(self) -> AbstractContextManager[None]:
        return self.offloading.lending() if self.offloading is not None else nullcontext()

    def contents(self) -> Contents:
        return Contents(self._model, self._optimizer, self.offloading)

    def open(self, plan: ExecutablePlan) -> Offloading | None:
        if self.offloading is None and plan.slots and self._open_tier is not None:
            self.offloading = Offloading(self._open_tier(), self._model, self._optimizer)
        return self.offloading

    def bind(
        self, plan: ExecutablePlan, outside: Mapping[str, torch.Tensor] | None = None, *, trains: bool = True
    ) -> Program:
        return bind(
            plan.source,
            plan.manifest.source_hash,
            str(plan.path),
            plan.trace,
            self._model,
            self._optimizer if trains else None,
            plan.slots,
            self.open(plan),
            outside,
            surroundings=self._surroundings,
        )

    def take_over(self, other: Executor) -> None:
        self.offloading = other.offloading

    def _surroundings(self, **given: Any) -> Iteration:
        found: Any = Noted(SingleIteration(**given), self.verbs)
        return found


@pytest.fixture
def made() -> Iterator[list[Recording]]:
    Recording.made = []
    yield Recording.made
    del Recording.made


def trained(executor: Any, stores: Path, folder: Path | None) -> tuple[list[float], list[torch.Tensor], str]:
    model = network()
    places = {"offload": Offload(folder), "method": "offmate"} if folder is not None else {}
    step = fit(
        model, BATCH, adamw, loss=loss_of, device_budget="70%" if folder is not None else "100%", cache_dir=stores,
        quick=True, executor=executor, **places,
    )  # fmt: skip
    torch.manual_seed(1)
    losses = [step(BATCH).item() for _ in range(3)]
    step.evaluate(BATCH)
    with step.on_device() as whole:
        return losses, [p.detach().clone() for p in whole.parameters()], step.planned.source


def verbs_of(source: str) -> Counter[str]:
    """How often each verb is in the text of a step."""
    calls = [line.split("run.", 1)[1].split("(")[0] for line in source.splitlines() if "run." in line and "(" in line]
    return Counter(name for name in calls if name in VERBS | AROUND)


@pytest.mark.parametrize("lower_tier", [False, True])
def test_a_second_executor_runs_the_same_steps(
    made: list[Recording], fit_stores: Path, tmp_path: Path, lower_tier: bool
) -> None:
    losses, weights, source = trained(Recording, fit_stores, tmp_path / "one" if lower_tier else None)
    (executor,) = made
    planned = verbs_of(source)
    found = Counter(executor.verbs)
    for verb, count in planned.items():
        assert found[verb] >= 3 * count, verb
    assert {"begin", "update"} <= planned.keys()
    assert not lower_tier or {"offload", "reload", "wait", "free"} <= planned.keys()
    same, others, text = trained(SingleDevice, fit_stores, tmp_path / "two" if lower_tier else None)
    assert losses == same
    assert text == source
    assert all(map(torch.equal, weights, others))


def test_the_verbs_are_what_one_device_has() -> None:
    own = {name for name, member in vars(SingleIteration).items() if callable(member) and not name.startswith("_")}
    assert own == VERBS | AROUND | CONDITIONS


def test_generated_code_may_call_these_verbs_alone() -> None:
    """A new one is to be seen here: what a step may call is what `runtime/whitelist.py` lets through."""
    assert {
        "begin", "changed", "clip", "free", "gather", "gathered", "keep", "keep_offloaded", "leave", "offload",
        "reload", "scatter", "scattered", "update", "update_all", "update_on_cpu", "update_together", "wait",
    } == VERBS  # fmt: skip
    assert {"as_in_forward"} == AROUND
    assert {"active"} == CONDITIONS
