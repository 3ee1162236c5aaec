"""Which sums are written over a summand: those behind which a plan frees one that never leaves the device."""

from __future__ import annotations

import pytest

from stowage.stages.ir.sums import taken_memory
from tests.simulate.small_plans import node

A, B, C = 10, 4, 12
NODES = [node(0, [A, B], [C], takes=(A, B)), node(1, [C], [13])]
SUM, OTHER, SOMETHING = (0, -1), (1, -1), (-1, -1)


def freed(storage: int) -> tuple[int, int]:
    return -1, storage


@pytest.mark.parametrize(
    ("rows", "moved", "taken"),
    [
        ([SUM, freed(A)], set(), {0: A}),
        ([SUM, freed(B), freed(A)], set(), {0: A}),  # the first summand, as eager's engine adds
        ([SUM, freed(99), freed(B)], set(), {0: B}),
        ([OTHER, SUM, freed(B), freed(A)], {A}, {1: B}),
        ([SUM, freed(A), SUM, freed(B)], set(), {0: A, 2: B}),
        ([SUM, freed(A)], {A}, {}),
        ([SUM, OTHER, freed(A)], set(), {}),
        ([SUM, SOMETHING, freed(A)], set(), {}),
        ([OTHER, freed(A)], set(), {}),
        ([freed(A), SUM], set(), {}),
    ],
)
def test_what_is_taken(rows: list[tuple[int, int]], moved: set[int], taken: dict[int, int]) -> None:
    assert taken_memory(NODES, rows, moved) == taken
