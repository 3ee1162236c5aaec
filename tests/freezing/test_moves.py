"""How far units move: ‖Δ‖₁/‖w‖₁, and equation (1) of SlimFit."""

from __future__ import annotations

import math

import pytest
import torch

from stowage.stages.device import device_of
from stowage.stages.ir.move_bytes import CHUNK, scratch_bytes
from stowage.stages.ir.units import Unit
from stowage.stages.runtime.moves import Moves

UNITS = [Unit("a", ("a.weight", "a.bias")), Unit("b", ("b.weight",))]


def moved(relative: bool, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, float]:
    moves, now = Moves(UNITS, relative), {name: tensor.clone() for name, tensor in old.items()}
    with moves.of(now):
        for name, tensor in now.items():
            tensor.copy_(new[name])
    return moves.take()


def test_distances_of_hand_made_moves() -> None:
    old = {"a.weight": torch.tensor([1.0, -2.0]), "a.bias": torch.tensor([4.0]), "other": torch.tensor([1.0])}
    new = {"a.weight": torch.tensor([1.5, -1.0]), "a.bias": torch.tensor([3.0]), "other": torch.tensor([9.0])}
    assert moved(False, old, new) == {"a": pytest.approx((0.5 + 1.0 + 1.0) / (1.0 + 2.0 + 4.0))}
    assert moved(True, old, new) == {"a": pytest.approx((0.5 + 0.5 + 0.25) / 3)}


def test_equation_1_over_more_elements_than_are_divided_at_a_time() -> None:
    draws = torch.Generator().manual_seed(0)
    old = {"b.weight": torch.randn(3, CHUNK // 2 + 7, generator=draws)}
    new = {"b.weight": old["b.weight"] + 0.01 * torch.randn(old["b.weight"].shape, generator=draws)}
    expected = ((new["b.weight"] - old["b.weight"]) / old["b.weight"]).abs().mean()
    assert moved(True, old, new)["b"] == pytest.approx(float(expected), rel=1e-4)


def test_zeros() -> None:
    """What was 0 is left out of (1); a unit that was 0 and moves has moved infinitely far."""
    old, new = {"b.weight": torch.tensor([0.0, 2.0])}, {"b.weight": torch.tensor([1.0, 3.0])}
    assert moved(True, old, new) == {"b": pytest.approx(0.5)}
    nothing = {"b.weight": torch.zeros(2)}
    assert moved(False, nothing, new) == {"b": math.inf}
    assert moved(False, nothing, nothing) == {"b": 0}


@pytest.mark.parametrize("relative", [False, True])
def test_nothing_stays_on_the_device(relative: bool) -> None:
    """A plan counts no bytes for what is known of an update once it is over."""
    moves, old, new = Moves(UNITS, relative), torch.ones(100), torch.full((100,), 2.0)
    moves.measured("a.weight", old.clone(), new)
    used_up = old.clone()
    measured = device_of("cpu").measure(lambda: moves.measured("b.weight", used_up, new))
    assert measured.peak_bytes > 0
    assert measured.end_bytes == 0
    assert moves.take() == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["rows", "columns", "cut"])
def test_no_more_memory_than_is_counted(relative: bool, dtype: torch.dtype, layout: str) -> None:
    """Whatever the order of the elements in memory, and where the weight is a part of something larger."""
    whole = torch.ones(400, 600, dtype=dtype)
    new = {"rows": whole, "columns": whole.t(), "cut": whole[:, 7:]}[layout]
    old = (new * 2).clone()
    moves = Moves(UNITS, relative)
    measured = device_of("cpu").measure(lambda: moves.measured("b.weight", old, new))
    assert measured.peak_bytes <= scratch_bytes(new.numel(), new.element_size(), "cpu", relative=relative)
    assert moves.take() == {"b": pytest.approx(0.5)}


def test_sums_beyond_the_largest_number_of_their_type() -> None:
    old = {"b.weight": torch.full((400, 600), 4.0, dtype=torch.float16)}
    new = {"b.weight": torch.full((400, 600), 5.0, dtype=torch.float16)}
    assert moved(False, old, new) == {"b": pytest.approx(0.25)}
    assert moved(True, old, new) == {"b": pytest.approx(0.25)}
