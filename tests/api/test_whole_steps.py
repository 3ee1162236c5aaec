"""Ctrl-C inside a step: the step is finished first, and only a second one breaks it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import TrainingStep, fit
from stowage.flows.api.whole_steps import WAITING
from tests.api.beside_plain import ROWS, WIDTH, adamw, mlp, square


@pytest.fixture(autouse=True)
def heard_by_python() -> Iterator[None]:
    """Workers may have been started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "handlers are put back"
    signal.signal(signal.SIGINT, before)


def batch(number: int) -> torch.Tensor:
    """And the dropout of that step."""
    torch.manual_seed(number)
    return torch.randn(ROWS, WIDTH)


class Interrupting:
    """Sends Ctrl-C, so many times, while the gradient of a parameter is complete in a step."""

    def __init__(self, model: nn.Module, at: int) -> None:
        self.times = 0
        list(model.parameters())[at].register_post_accumulate_grad_hook(self)

    def __call__(self, _parameter: Any) -> None:
        while self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)


def started(stores: Path, at: int, offload: Path | None = None) -> tuple[TrainingStep, Interrupting, list[str]]:
    torch.manual_seed(0)
    model, said = mlp(), list[str]()
    interrupting = Interrupting(model, at)
    optimizer = adamw(model)
    more: dict[str, Any] = {"device_budget": "150%"}
    if offload:
        more = {"offload_dir": offload, "method": "offmate", "device_budget": 17_060_000}
    step = fit(model, batch(0), optimizer, loss=square, say=said.append, **more)
    return step, interrupting, said


def weights(step: TrainingStep) -> list[torch.Tensor]:
    with step.on_device():
        return [t.detach().clone() for t in (*step.model.parameters(), *step.model.buffers())]


@pytest.mark.parametrize("at", [0, 1, -1])
def test_the_step_is_finished_first(fit_stores: Path, at: int) -> None:
    step, interrupting, said = started(fit_stores, at)
    plain, _, _ = started(fit_stores, at)
    for number in range(4):
        interrupting.times = number % 2
        if interrupting.times:
            with pytest.raises(KeyboardInterrupt):
                step(batch(number))
            assert said[-1] == WAITING
        else:
            step(batch(number))
        plain(batch(number))
        assert all(map(torch.equal, weights(step), weights(plain)))


def test_a_second_one_breaks_it_and_says_what_state_the_model_is_in(fit_stores: Path) -> None:
    step, interrupting, said = started(fit_stores, 0)
    before = weights(step)
    interrupting.times = 2
    with pytest.raises(
        KeyboardInterrupt, match=r"The step was broken off: \d of 6 parameters are of the broken"
    ) as error:
        step(batch(0))
    assert said[-1] == str(error.value)
    changed = sum(not torch.equal(a, b) for a, b in zip(before, weights(step)))
    assert f": {changed} of 6" in str(error.value)
    assert 0 < changed < 6


def test_one_before_the_first_update_says_so(fit_stores: Path) -> None:
    step, interrupting, _ = started(fit_stores, -2)
    before = weights(step)
    interrupting.times = 2
    with pytest.raises(KeyboardInterrupt, match="no parameter has been updated yet"):
        step(batch(0))
    assert all(map(torch.equal, before, weights(step)))


def test_what_was_saved_goes_on(fit_stores: Path, tmp_path: Path) -> None:
    step, interrupting, _ = started(fit_stores, 0)
    step.save(tmp_path / "saved")
    expected = [float(step(batch(n))) for n in range(3)]
    step.load(tmp_path / "saved")
    interrupting.times = 2
    with pytest.raises(KeyboardInterrupt):
        step(batch(0))
    step.load(tmp_path / "saved")
    assert [float(step(batch(n))) for n in range(3)] == expected


def test_while_weights_are_offloaded(fit_stores: Path, tmp_path: Path) -> None:
    step, interrupting, _ = started(fit_stores, 0, tmp_path)
    assert step.plan.lower_tier_bytes > 0
    plain, _, _ = started(fit_stores, 0)
    for number in range(3):
        interrupting.times = 1
        with pytest.raises(KeyboardInterrupt):
            step(batch(number))
        plain(batch(number))
        assert all(map(torch.equal, weights(step), weights(plain)))


def test_handlers_of_the_users_hear_of_it_at_the_end(fit_stores: Path) -> None:
    step, interrupting, _ = started(fit_stores, 0)
    heard: list[list[str]] = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(list(step.programs.latest.program.updated)))  # type: ignore[union-attr]
    try:
        interrupting.times = 1
        step(batch(0))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert len(heard) == 1
    assert len(heard[0]) == 6


@pytest.mark.parametrize("handler", [signal.SIG_IGN])
def test_what_is_ignored_stays_ignored(fit_stores: Path, handler: Any) -> None:
    step, interrupting, said = started(fit_stores, 0)
    signal.signal(signal.SIGINT, handler)
    try:
        interrupting.times = 2
        step(batch(0))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert WAITING not in said


def test_threads_train_too(fit_stores: Path) -> None:
    step, _, _ = started(fit_stores, 0)
    losses: list[float] = []
    work: Callable[[], None] = lambda: losses.append(float(step(batch(0))))  # noqa: E731
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(losses) == 1
