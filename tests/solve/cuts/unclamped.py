"""The bounds that plans are given, as they were proven: what a plan states is never above its own time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stowage.stages.solve import Solved
from stowage.stages.solve.cuts import proven as proven_module
from stowage.stages.solve.cuts.statement import Bound, with_bound

SAME = 1 + 1e-12
"""The same times may be added up in another order."""


@contextmanager
def bounds_as_proven() -> Iterator[list[float]]:
    """The seconds of every bound by cuts that is to be stated meanwhile; none is above the plan that it is given to."""
    found: list[float] = []

    def noted(plan: Solved, bound: Bound, proven: float) -> Solved:
        found.append(bound.seconds)
        assert bound.seconds <= plan.summary.step_time_s * SAME
        return with_bound(plan, bound, proven)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proven_module, "with_bound", noted)
        yield found
