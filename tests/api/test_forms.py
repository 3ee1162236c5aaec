"""Forms planned ahead, and how many programs stay in memory."""

from __future__ import annotations

import gc
import linecache
import weakref
from pathlib import Path

import pytest

from stowage.stages.ir.errors import ParameterError
from tests.api.test_lengths import Beside, Tagger, batch_of


def test_forms_are_planned_ahead_the_largest_first(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 8, forms=[batch_of(12), batch_of(32), batch_of(8)], device_budget="80%")
    shapes = [k.key[0].leaves[1].value for k in beside.step.programs.known]
    assert ["(4, 8)" in s for s in shapes] == [True, False, False]
    budgets = {k.planned.summary.device_budget_bytes for k in beside.step.programs.known}
    assert budgets == {int(0.8 * max(k.planned.eager_peak_bytes for k in beside.step.programs.known))}
    said = len(beside.said)
    beside.train(32, 8, 12)
    assert len(beside.said) == said, "nothing is left to plan"


def test_a_range_of_lengths(fit_stores: Path) -> None:
    beside = Beside(
        Tagger, fit_stores, 20, forms=range(8, 21, 6), resize=lambda batch, n: {k: v[:, :n] for k, v in batch.items()}
    )
    assert len(beside.step.programs.known) == 3
    said = len(beside.said)
    beside.train(20)
    assert len(beside.said) == said


def test_programs_in_memory_are_bounded_and_freed(fit_stores: Path) -> None:
    beside = Beside(Tagger, fit_stores, 24, programs=2)
    beside.train(10, 12)
    dropped = [k for k in beside.step.programs.known if "(4, 10)" in k.key[0].leaves[1].value]
    references = [weakref.ref(k.program) for k in dropped] + [weakref.ref(k.planned) for k in dropped]
    file = str(dropped[0].planned.folder / "step.py")
    assert file in linecache.cache
    del dropped
    beside.train(14)
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert file not in linecache.cache
    assert len(beside.step.programs.known) == 2
    beside.train(10, 24, 12)
    assert any("(4, 10) again" in s for s in beside.said)


@pytest.mark.parametrize("programs", [0, -1, True, 2.5])
def test_a_wrong_number_of_programs(programs: object, fit_stores: Path) -> None:
    with pytest.raises(ParameterError, match="programs is"):
        Beside(Tagger, fit_stores, 8, programs=programs)
