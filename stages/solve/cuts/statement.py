"""States in a plan the bound of every schedule, unless the plan itself is faster: then the bound is wrong.

Nothing that is trained depends on a bound, so that users get their plan all the same, without one, and a warning to
report. Where bounds are tested or measured the warning is an error (`contradictions_are_errors`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stowage.stages.ir.amounts import time_text
from stowage.stages.solve.summary import Solved

TOLERANCE = 1e-6
"""Relative distance by which a bound may be above a plan: solvers count with tolerances, and sums are rounded."""


class ContradictedBound(RuntimeWarning):
    """A plan that the referee accepted is faster than the bound of every plan."""


@dataclass(frozen=True)
class Bound:
    """A time that no schedule beats.

    Attributes:
        seconds: the time.
        kind, cuts, variant: as `bound_kind`, `bound_cuts` and `bound_variant` of `PlanSummary` have them.
    """

    seconds: float
    kind: str
    cuts: tuple[str, ...]
    variant: str


def with_bound(plan: Solved, bound: Bound, proven: float) -> Solved:
    """Return a plan with the bound, and its distance to it; without one, and with a warning, if it is faster.

    Args:
        plan: the plan.
        bound: what was proven of all plans.
        proven: relative distance to the bound within which a plan counts as optimal.
    """
    s = plan.summary
    if bound.seconds > s.step_time_s * (1 + TOLERANCE):
        warnings.warn(ContradictedBound(_contradiction(s.step_time_s, bound)), stacklevel=2)
        return plan
    bound_s = min(bound.seconds, s.step_time_s)
    gap = 1 - bound_s / s.step_time_s
    status = "optimal" if gap <= proven else "feasible" if s.status == "optimal" else s.status
    summary = replace(
        s,
        bound_s=bound_s,
        bound_kind=bound.kind,
        bound_cuts=bound.cuts,
        bound_variant=bound.variant,
        status=status,
        gap=gap,
    )
    return replace(plan, summary=summary)


def _contradiction(step_time_s: float, bound: Bound) -> str:
    more = bound.seconds / step_time_s - 1
    return (
        f"Internal error: the plan's step takes {time_text(step_time_s)}, and a part of {more:.1e} more than that was "
        f"proven of every step ({bound.kind} of {bound.variant} at {', '.join(bound.cuts) or 'no node'}): the plan is "
        "right and states no bound; please report this."
    )


@contextmanager
def contradictions_are_errors() -> Iterator[None]:
    """Raise `ContradictedBound` where a plan is faster than its bound: for whoever measures bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ContradictedBound)
        yield
