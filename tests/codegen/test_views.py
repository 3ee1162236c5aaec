"""Views in a generated step: what shows the same form has no line, what is a view of views has one, and all show the
numbers of plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.codegen import emit_step
from stowage.stages.trace import MicroBatch
from stowage.stages.workload.randomness import seeded
from tests.offload.test_offloaded_training import adamw
from tests.runtime.beside_eager import assert_equal_training, prepare
from tests.streams.checking import Job, check, in_random_order
from tests.streams.hand_plans import HandMade, Way
from tests.streams.jobs import piece_of
from tests.zoo import Entry

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def same_form(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Nothing but other names for what is there."""
    y = torch.tanh(x @ w)
    return (y.view(6, 8).expand(6, 8)[:].view_as(y)) * y


def views_of_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    return y.view(6, 2, 4).view(6, 4, 2).view(3, 2, 8).view(48).view(2, 24).sin()


def freed_with_their_storage(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Read under several names, and computed again."""
    y = torch.tanh(x @ w)
    z = torch.sin(y.view(6, 8))
    u = torch.exp(z.view(2, 24).view(6, 8)) + y.view(6, 8)
    return torch.tanh(u.view(6, 8) @ w) * z


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w).sum(0)
    return y.view(1, 8).expand(6, 8).expand(6, 8) * torch.sin(x) + y.expand(3, 8).sum()


def sliced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    return y[:, :][0:6] * y[:, ::2].repeat(1, 2) + y[1:, 1:][:, :4].sum() + y[0:6:1].view(8, 6).sum()


def of_size_one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Strides of such dimensions may be anything."""
    y = torch.tanh(x @ w).view(6, 1, 8).transpose(1, 2)
    return y.reshape(6, 8).view(6, 8, 1).expand(6, 8, 1).squeeze(2) * y.view(6, 8, 1).view(6, 1, 8).view(6, 8)


def empty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    none = y[:0].view(0, 8).view(0, 4, 2).view(0, 8)
    return torch.cat([y, none, y[:, 8:].view(6, 0).reshape(0, 8)]).sin() + none.sum()


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Views of what is not contiguous stay as they are."""
    y = torch.tanh(x @ w).t()
    return y.view(2, 4, 6).view(2, 2, 2, 6).sin().reshape(8, 6).t() * y.t().view(48).view(6, 8)


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Written through one view, read through another."""
    y = (x @ w).sin()
    y.view(48).view(2, 24).mul_(2)
    return torch.tanh(y.view(6, 8).view(3, 16)).view(6, 8)


BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (
        same_form, views_of_views, freed_with_their_storage, expanded, sliced, of_size_one, empty, transposed, in_place,
    )
}  # fmt: skip


class Views(nn.Module):
    """A body between what trains."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = nn.Parameter(torch.randn(8, 8))
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(torch.tanh(self.first(x)), self.middle)
        return self.last(torch.sin(y).reshape(-1, 8)).pow(2).mean()


def build_with(body: Body) -> Callable[[], Entry]:
    def build() -> Entry:
        with seeded(0):
            return Views(body), {"x": torch.randn(6, 8)}, lambda outputs, _: outputs

    return build


@pytest.mark.parametrize("name", BODIES)
def test_equal_to_eager(name: str) -> None:
    """Keeping everything, and with as much computed again as can be."""
    build = build_with(BODIES[name])
    prepared = prepare(build)
    for solved in (prepared.solve(), prepared.smallest()):
        assert_equal_training(build, prepared, solved, optimizer=adamw, iterations=2)


@pytest.mark.parametrize("name", BODIES)
def test_reloaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations go down and come back, in other memory, whatever showed them before: no race, and eager's numbers."""
    monkeypatch.setattr("tests.streams.hand_plans.SMALLEST", 16)
    build = build_with(BODIES[name])
    made = HandMade(build, adamw, MicroBatch())
    for seed, plan in enumerate((made.streaming(Way(ahead=1, lag=0)), made.recompute_all())):
        if seed == 0:
            assert "run.reload(" in plan.source
            assert re.search(r"\w+ = run\.wait\(", plan.source), "an activation comes back"
        job = Job(name, build, adamw, (piece_of(plan),), rounds=2)
        assert check(job, in_random_order(seed)).all() == []


def lines_of(name: str) -> list[str]:
    prepared = prepare(build_with(BODIES[name]))
    solved = prepared.solve()
    return emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary).splitlines()


def forward_lines(name: str) -> list[str]:
    lines = lines_of(name)
    end = next(i for i, line in enumerate(lines) if ".mean" in line or "torch.mean" in line)
    return lines[:end]


def test_what_shows_the_same_form_has_no_line() -> None:
    text = "\n".join(forward_lines("same_form"))
    assert ".view(" not in text
    assert "expand" not in text
    assert "slice" not in text


def test_views_of_views_are_one_line() -> None:
    assert sum(".view(" in line for line in forward_lines("views_of_views")) <= 2, "that, and what the last layer reads"


def test_nothing_is_deleted_twice() -> None:
    """Names that stand for one value are one name."""
    for name in BODIES:
        for line in lines_of(name):
            if line.strip().startswith("del "):
                names = line.strip()[4:].split(", ")
                assert len(names) == len(set(names)), line
