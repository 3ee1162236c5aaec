"""An operation that runs again draws what it drew the first time, in this iteration and not in an earlier one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.runtime import RandomStates
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import adamw, prepare, program_of
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO, Entry


@pytest.fixture
def states() -> RandomStates:
    return RandomStates(torch.device("cpu"))


def test_replay_draws_the_same_and_leaves_no_trace(states: RandomStates) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        with states.record(7):
            first = torch.rand(4)
        between = torch.rand(4)
        state = torch.get_rng_state()
        for _ in range(2):
            with states.replay(7):
                assert torch.equal(torch.rand(4), first)
                torch.rand(100)
            assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(first, between)
        states.forget(7)
        with pytest.raises(KeyError), states.replay(7):
            pass


def test_a_new_iteration_records_anew(states: RandomStates) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        found = []
        for _ in range(2):
            with states.record(0):
                found.append(torch.rand(4))
        with states.replay(0):
            assert torch.equal(torch.rand(4), found[1])
        assert not torch.equal(found[0], found[1])


def test_a_fault_during_replay_restores_the_generator(states: RandomStates) -> None:
    with states.record(0):
        torch.rand(1)
    state = torch.get_rng_state()
    with contextlib.suppress(RuntimeError), states.replay(0):
        torch.rand(5)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), state)


class Watched(nn.Module):
    """Its output is its dropout mask, times a weight that is 1 and a gradient that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(nn.functional.dropout(torch.exp(self.weight) * x, 0.5))
        return torch.exp(torch.tanh(hidden)).sum()


def test_masks_differ_between_iterations_and_agree_within_one() -> None:
    """The gradient is 0 exactly where the mask is: of the iteration's own mask, not of the first one's."""

    def build() -> Entry:
        with seeded(0):
            return Watched(), {"x": torch.ones(64)}, lambda outputs, _: outputs

    prepared = prepare(build, None)
    solved = prepared.smallest()
    model, batch, _ = build()
    program = program_of(prepared, solved, model, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        masks = []
        for _ in range(3):
            state = torch.get_rng_state()
            model.weight.grad = None
            program(batch)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            mask = torch.empty(64).bernoulli_(0.5) > 0
            torch.set_rng_state(after)
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad != 0, mask)
            masks.append(mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_a_step_that_breaks_off_forgets_its_states() -> None:
    """The next step works, and holds no state of the broken one."""
    prepared = prepared_zoo("gpt2")
    model, batch, _ = ZOO["gpt2"]()
    program = program_of(prepared, prepared.smallest(), model, adamw(model))
    good = dict(batch)
    bad = {**batch, "labels": torch.full_like(batch["labels"], 1000)}
    with torch.random.fork_rng(devices=[]):
        with pytest.raises((RuntimeError, IndexError)):
            program(bad)
        assert not program._random._states
        assert torch.isfinite(program(good).detach())
        assert not program._random._states


def test_statistics_are_updated_once() -> None:
    """BatchNorm's momentum makes a second update visible; the count of batches too."""
    prepared = prepared_zoo("batchnorm")
    solved = prepared.smallest()
    again = [prepared.nodes[r.node] for r in solved.rows if r.recompute]
    assert any(n.mutates for n in again), "the statistics' node runs twice"
    (model, batch, _), (eager, _, _) = ZOO["batchnorm"](), ZOO["batchnorm"]()
    program = program_of(prepared, solved, model, adamw(model))
    with torch.random.fork_rng(devices=[]):
        program(batch)
        eager(**batch)
    counts = [int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
    assert counts == [1, 1]
    theirs = dict(eager.named_buffers())
    first = next(n for n, _ in model.named_buffers() if n.endswith("running_mean"))
    assert torch.equal(dict(model.named_buffers())[first], theirs[first])
