"""Where cuts are added: in each interval in which a schedule exceeds the budget, and nowhere else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.stages.formulations.cuts.choice import Choice
from tests.formulations.cuts.by_hand import node, step
from tests.formulations.cuts.tiny_steps import chains_of_cuts, tiny_steps

CHAIN = step([node(n, [n - 1] if n else [], [n]) for n in range(8)], [1] * 8)


@pytest.mark.parametrize(
    ("level", "more"),
    [
        ([5] * 8, []),
        ([5, 5, 9, 5, 5, 5, 5, 5], [2]),
        ([5, 7, 9, 5, 5, 5, 8, 5], [2, 6]),
        ([5, 9, 9, 5, 9, 5, 5, 7], [1, 7]),  # the cut itself, at 4, has its row already
    ],
)
def test_one_in_each_interval_that_exceeds_the_budget(level: list[int], more: list[int]) -> None:
    assert Choice(CHAIN).more([4], list(range(8)), level, 6) == more


def test_where_the_worst_node_may_be_no_cut_the_nearest_that_exceeds_the_budget_is() -> None:
    level = [5, 7, 9, 5, 5, 5, 5, 5]
    assert Choice(CHAIN, among={0, 1, 3}).more([4], list(range(8)), level, 6) == [1]
    assert Choice(CHAIN, among={0, 3}).more([4], list(range(8)), level, 6) == [3]
    assert Choice(CHAIN, among={6}).more([4], list(range(8)), level, 6) == []


@given(st.data())
def test_old_and_new_cuts_are_a_chain(data: st.DataObject) -> None:
    graph = data.draw(tiny_steps())
    cuts = data.draw(chains_of_cuts(graph))
    order = list(range(len(graph.nodes)))
    level = [data.draw(st.integers(1, 9)) for _ in order]
    more = Choice(graph).more(cuts, order, level, 5)
    assert not set(more) & set(cuts)
    assert all(graph.precedes(a, b) for a, b in pairwise(sorted({*cuts, *more})))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_more_hot_places_than_were_asked_for(count: int) -> None:
    """Also where what is full first and what is fullest are two."""
    backward = [node(n, [n - 1] if n else [], [n]) for n in range(40)]
    graph = step([type(n)(**{**vars(n), "phase": "backward"}) for n in backward], [1] * 40)
    peaks = {n: 1000 - abs(n - 25) for n in range(40)}
    found = Choice(graph).hottest(peaks, count)
    assert len(found) == len(set(found)) == count
