"""The four steps of GELU's and SiLU's derivative are the best there are, found again without our code.

Few-bit backward (Novikov et al. 2022) looks for the function of 2^b steps q with the least ∫ (f'(x) − q(x))² dx; its
notebook does so over [−10, 10], with equal weight everywhere, and so do our constants. The best height of a step over
[a, b] is the mean of f' there, (f(b) − f(a)) / (b − a), so that the borders alone are looked for, all three of them:
nothing is taken to be symmetric. The table that comes with the authors' package is of [−100, 100], where the outer
steps are flatter; the same search finds its numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from stowage.stages.rewrite.lossy.bits import GELU, SILU, FourPoints

Function = Callable[[float], float]


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


FUNCTIONS: dict[str, tuple[Function, FourPoints]] = {"gelu": (gelu, GELU), "silu": (silu, SILU)}


def heights(function: Function, borders: np.ndarray, end: float) -> list[float]:
    edges = [-end, *borders, end]
    return [(function(b) - function(a)) / (b - a) for a, b in itertools.pairwise(edges)]


def best_steps(function: Function, end: float) -> tuple[np.ndarray, list[float]]:
    """Return the three borders and four heights of the least squared distance over [−end, end]."""

    def distance(borders: np.ndarray) -> float:
        """Return ∫ (f' − q)², less ∫ f'², which no border changes."""
        edges = [-end, *borders, end]
        if min(b - a for a, b in itertools.pairwise(edges)) <= 1e-9:
            return math.inf
        return -sum((function(b) - function(a)) ** 2 / (b - a) for a, b in itertools.pairwise(edges))

    coarse = [-5.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0]
    starts = sorted(itertools.combinations(coarse, 3), key=lambda borders: distance(np.array(borders)))[:12]
    options = {"xatol": 1e-10, "fatol": 1e-15, "maxiter": 4000, "maxfev": 4000}
    found = [minimize(distance, np.array(start), method="Nelder-Mead", options=options) for start in starts]
    borders = min(found, key=lambda result: result.fun).x
    return borders, heights(function, borders, end)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_our_steps_are_the_best_over_ten(name: str) -> None:
    function, ours = FUNCTIONS[name]
    borders, steps = best_steps(function, 10.0)
    assert [-ours.bound, 0.0, ours.bound] == pytest.approx(list(borders), abs=1e-6)
    points = torch.tensor([-ours.far, -ours.near, ours.near, ours.far], dtype=torch.float64, requires_grad=True)
    getattr(torch.nn.functional, name)(points).sum().backward()
    assert points.grad is not None
    assert points.grad.tolist() == pytest.approx(steps, abs=1e-6), "backward runs on points of these slopes"


PUBLISHED = {
    "gelu": ([-0.453594351, 9.98979468e-06, 0.453607887], [-0.00148117, 0.32506426, 0.67494831, 1.0014812]),
    "silu": ([-0.743275412, 2.86767719e-05, 0.743317995], [-0.00241343, 0.32229517, 0.67772784, 1.0024135]),
}
"""Borders and heights of `fewbit/data/builtin.npz` of the authors' package, which were found to within 1e-4."""


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_search_finds_the_published_table(name: str) -> None:
    borders, steps = best_steps(FUNCTIONS[name][0], 100.0)
    assert list(borders) == pytest.approx(PUBLISHED[name][0], abs=1e-4)
    assert steps == pytest.approx(PUBLISHED[name][1], abs=1e-4)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_no_other_border_is_better(name: str) -> None:
    """By sums over a fine grid, of the very derivative that autograd has."""
    ours = FUNCTIONS[name][1]
    x = (torch.linspace(-10, 10, 200_001, dtype=torch.float64)[:-1] + 5e-5).requires_grad_()
    (slope,) = torch.autograd.grad(getattr(torch.nn.functional, name)(x).sum(), x)
    x = x.detach()

    def distance(bound: float) -> float:
        parts = [x < -bound, (x >= -bound) & (x < 0), (x >= 0) & (x < bound), x >= bound]
        return sum(float((slope[part] - slope[part].mean()).square().sum()) for part in parts)

    best = distance(ours.bound)
    assert all(distance(ours.bound + away) > best for away in (-0.2, -0.05, -0.01, 0.01, 0.05, 0.2))
