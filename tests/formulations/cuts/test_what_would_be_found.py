"""The comparison with all schedules finds wrong bounds: most of its steps must run something again, of every kind."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.formulations.cuts.drawn import drawn_steps
from tests.formulations.cuts.mutants import MUTANTS, Mutant
from tests.formulations.cuts.tiny_steps import KINDS, kinds_of

SAME = 1 + 1e-9

OFTEN = 2
"""Draws that each kind and each mutant is found in at least: one may be chance."""


def test_most_draws_run_something_again_and_every_kind_is_in_some() -> None:
    """Where nothing runs again a bound that is too low or too high by a little is not seen."""
    drawn = drawn_steps()
    binding = [d for d in drawn if d.binds]
    assert len(binding) >= len(drawn) / 4
    kinds = Counter(kind for d in binding for kind in kinds_of(d.step))
    assert {kind for kind in KINDS if kinds[kind] < OFTEN} == set()


def test_no_bound_of_these_steps_as_they_are_is_above_the_fastest_schedule() -> None:
    for d in drawn_steps():
        assert d.fastest is None or d.bound_s(d.step) <= d.fastest.time_s * SAME


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_graph_that_demands_too_much_is_found(mutant: Mutant) -> None:
    """Its bound is above the fastest schedule of the step as it is."""
    found = 0
    for d in drawn_steps():
        if d.fastest is not None and d.cuts and (broken := mutant(d.step)) != d.step:
            found += d.bound_s(broken) > d.fastest.time_s * SAME
        if found == OFTEN:
            return
    pytest.fail(f"{found} of the draws tell that {mutant.__name__}")
