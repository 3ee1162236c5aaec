"""Bounds what codes do to the gradient of a step that freezes: it has the gradients of the units that train alone.

The change of a few units' gradients may be large beside these gradients, and small beside those of the whole model. So
an error is that of the mask under which it is largest. For the sets M of at least k units,

    e² = max over M of  (c_0 + Σ_{u∈M} c_u) / (n_0 + Σ_{u∈M} n_u)

where c_u and n_u are the squared norms of the change of a unit's gradient and of that gradient, c_0 and n_0 those of
what always trains. It is found as the e² at which max over M of c_0 − e² n_0 + Σ (c_u − e² n_u) is 0 (Dinkelbach's
method): for a given e² the best M are the k units with the largest terms, and all others whose terms are positive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, isfinite

from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.units import Unit

Norms = tuple[float, float]
"""Squared norms of the change of a gradient, and of the gradient."""


def errors_under_masks(errors: Iterable[GradientError], units: Sequence[Unit], least: int) -> list[GradientError]:
    """Return errors as the most that they are in any step, for steps in which some units train.

    Args:
        errors: as they were measured, parameter by parameter.
        units: the units; parameters in none always train.
        least: the number of units that train in each step at least; with 0, one is taken to train.
    """
    return [
        replace(error, squared_error=_largest(error, units, least), parameters=(), changes=(), shares=())
        for error in errors
    ]


def _largest(error: GradientError, units: Sequence[Unit], least: int) -> float:
    unit_of = {name: number for number, unit in enumerate(units) for name in unit.parameters}
    always, own = (0.0, 0.0), dict[int, Norms]()
    for name, change, share in zip(error.parameters, error.changes, error.shares, strict=True):
        number = unit_of.get(name)
        if number is None:
            always = always[0] + change, always[1] + share
        else:
            known = own.get(number, (0.0, 0.0))
            own[number] = known[0] + change, known[1] + share
    if not error.squared_error:
        return 0.0  # nothing was changed on any batch
    return max(error.squared_error, largest_ratio(always, list(own.values()), max(1, least)))


def largest_ratio(always: Norms, units: Sequence[Norms], least: int) -> float:
    """Return the largest ratio of the first to the second sum, of any set of so many units or more.

    Args:
        always: what is in every set.
        units: of each unit; where there are fewer than `least`, all are taken.
        least: the number of units in the smallest sets.

    Returns:
        The ratio; infinity where a set has a change and no gradient.
    """
    ratio = 0.0
    while True:
        terms = sorted(((c - ratio * n if n else c, c, n) for c, n in units), reverse=True)
        taken = [(c, n) for place, (term, c, n) in enumerate(terms) if place < least or term > 0]
        change, norm = (sum(values) for values in zip(always, *taken, strict=True))
        found = change / norm if norm else inf if change else 0.0
        if not isfinite(found):
            return inf
        if found <= ratio:
            return ratio
        ratio = found
