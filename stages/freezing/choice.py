"""Reads what a run of the pipeline freezes: its policy, and the units of its trace."""

from __future__ import annotations

from collections.abc import Iterable

from stowage.stages.freezing.errors import errors_under_masks
from stowage.stages.freezing.policies import Policy, active_count, most_active, policy_named
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import Freezable, FreezeChoice
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables


def freezable_of(trace: TraceTables, choice: FreezeChoice) -> Freezable | None:
    """Return what the steps of a run may freeze; None where nothing is frozen.

    Raises:
        ParameterError: the run cannot freeze.
    """
    if not choice.policy:
        return None
    if not trace.meta.optimizer:
        raise ParameterError("solve.freeze leaves parameters out of updates: set trace.optimizer, or leave it out.")
    units = units_of(trace, choice.units)
    if not units:
        raise ParameterError("solve.freeze finds nothing to freeze: no parameter of the model gets a gradient.")
    return Freezable(tuple(units), most_active(policy_of(choice), len(units), choice.rate))


def errors_of(errors: Iterable[GradientError], trace: TraceTables, choice: FreezeChoice) -> list[GradientError]:
    """Return errors of codes as the most that they are in any step of a run, whatever trains in it.

    Raises:
        ParameterError: the run cannot freeze.
    """
    freezable = freezable_of(trace, choice)
    if freezable is None:
        return list(errors)
    return errors_under_masks(errors, freezable.units, active_count(len(freezable.units), choice.rate))


def policy_of(choice: FreezeChoice) -> Policy:
    """Return the policy of a run."""
    return policy_named(choice.policy, choice.rate, choice.seed, choice.over)
