"""A row of a plan before it is timed: planners make these rows, and the referee replays them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stowage.stages.ir.actions import ACTIONS, PlanAction
from stowage.stages.ir.plan import PlanRow


@dataclass(frozen=True)
class Step:
    """One action before it is timed.

    Attributes:
        node: node to compute, or -1; for an `update` the update's node.
        storage: storage that `action` concerns, or -1; for an `update` the parameter.
        label: label of the step, for people.
        action: what is done with `storage`.
    """

    node: int
    storage: int
    label: str
    action: PlanAction = "free"

    @staticmethod
    def of(row: PlanRow) -> Step:
        """Return the action of a row without its times."""
        return Step(row.node, -1 if row.action == "compute" else row.storage, row.step, row.action)

    @cached_property
    def kind(self) -> PlanAction:
        """Return the action; with a node that no other action runs it is `compute`."""
        return "compute" if self.node >= 0 and not ACTIONS[self.action].on_node else self.action
