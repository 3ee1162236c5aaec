"""Says what steps of one model may freeze: its units, and how many of them train at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stowage.stages.freezing.copies import costs_with_copies
from stowage.stages.freezing.errors import errors_under_masks
from stowage.stages.freezing.policies import Policy, active_count, most_active
from stowage.stages.freezing.units import units_of
from stowage.stages.ir.costs import Cost
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import Freezable, UnitKind
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.trace import TraceTables


@dataclass
class Freezing:
    """The units of one model, found in the first step that is planned, and the policy that chooses among them.

    Attributes:
        kind: kind of units, see `freezing.units`.
        rate: the freezing rate.
        policy: chooses what trains.
        measures: updates copy the weights before them, to measure how far they move.
        relative: how this is measured, see `runtime.moves`.
        say: is told what the user should know, one sentence each.
    """

    kind: UnitKind
    rate: float
    policy: Policy
    measures: bool = True
    relative: bool = False
    say: Callable[[str], None] = lambda text: None
    _found: Freezable | None = field(default=None, init=False)
    _trained: frozenset[str] = field(default=frozenset(), init=False)

    @property
    def found(self) -> Freezable | None:
        """Return the units, once a step has been planned."""
        return self._found

    def adopt(self, found: Freezable | None) -> None:
        """Take the units that the first of several ranks has found, which plans for all."""
        self._found = found

    def freezable(self, trace: TraceTables) -> Freezable:
        """Return what a step may freeze; the same units in all steps of the model.

        Raises:
            ParameterError: there are no units, or they are not those of another step of the model.
        """
        trained = {g.parameter for g in trace.gradients if g.gradient_value >= 0}
        if self._found is None:
            units = units_of(trace, self.kind)
            if not units:
                raise ParameterError("freeze finds nothing to freeze: no parameter of the model gets a gradient.")
            self._found = Freezable(tuple(units), most_active(self.policy, len(units), self.rate))
            self._trained = frozenset(trained)
        missing = [n for unit in self._found.units for n in unit.parameters if n not in trained]
        if missing:
            raise ParameterError(
                f"freeze has units of the first step that was planned, and parameter '{missing[0]}' gets no gradient "
                "in this one: freeze another kind of units, let every batch train the same parameters, or call fit "
                "again if requires_grad has changed."
            )
        if self._trained and (late := sorted(trained - self._trained)):
            self._trained |= trained
            self.say(
                f"Parameter '{late[0]}' gets a gradient in this step and got none in the first one that was planned, "
                "of which freeze has its units: it is in none of them and trains in every step; call fit again to "
                "let it be frozen too."
            )
        return self._found

    def errors_of(self, errors: Iterable[GradientError], freezable: Freezable) -> list[GradientError]:
        """Return errors of codes as the most that they are in any step, whatever trains in it.

        A policy of one's own is taken to train as many units as the rate says.
        """
        return errors_under_masks(errors, freezable.units, active_count(len(freezable.units), self.rate))

    def with_copies(self, costs: Iterable[Cost], traces: Iterable[TraceTables]) -> list[Cost]:
        """Return the costs with what measuring the moves of weights takes: a copy in each update."""
        return costs_with_copies(costs, traces, relative=self.relative) if self.measures else list(costs)
