"""Proposes what ZeRO, Elixir and the exact choice of four states make of groups, each as a plan of the same step.

Nothing that is chosen afterwards may be slower than any of them that fits: they are baselines. The exact choice is
asked with the sizes and times of the program's own plans, and asked again with less memory where the referee, which
counts row by row, finds that it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.elixir.on_fsdp2 import greedy_choices
from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.formulations.sharding.four_states.solve import exact_choice
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solve.collectives.group_table import table_of
from stowage.stages.solve.collectives.groupings import Grouping, groupings
from stowage.stages.solve.collectives.groups import GroupsChoice, lowered
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.proposal import JudgedPlan, Proposal, Proposals, Task
from stowage.stages.solver.outcome import SolverSettings

ASKED = 3
"""Times that the exact choice is asked for."""

EFFORT = SolverSettings(time_limit_s=4.0, gap=5e-3)
"""Limits of each."""

MANY = 50
"""Groups from which on the exact choice has more time."""

LITTLE = 0.02
"""Share of the budget that the exact choice may leave."""

Choices = Sequence[GroupChoice]

_Known: TypeAlias = dict[tuple[GroupsChoice, bool], JudgedPlan | None]
"""What was judged already, by the choice and whether gradients stay whole."""


@dataclass(frozen=True)
class GroupRace:
    """Proposes the choices for groups.

    Attributes:
        offloader: the program and its lower tier.
        grouping: the groups; by default those that each block reads first, and those of each layer.
        others: choices that were made elsewhere for these groups, by name.
        settings: limits of the exact choice.
    """

    offloader: Offloader
    grouping: Grouping | None = None
    others: Mapping[str, Choices] = field(default_factory=dict)
    settings: SolverSettings = EFFORT

    def propose(self, task: Task) -> Proposals:
        """Propose the fixed policies, the choices of others, the greedy choice, and exact ones.

        ZeRO-1 with states in the host is no choice of four states: gradients are whole until backward has ended.
        """
        found = groupings(self.offloader.program) if self.grouping is None else [self.grouping]
        known: _Known = {}
        for number, grouping in enumerate(found):
            asked = _Asked(self, task, grouping, "groups" if number == 0 else "layers", known)
            yield from asked.propose()
            known |= asked.judged


class _Asked:
    """Proposes the choices for one way to group parameters.

    Attributes:
        judged: what was judged of them.
    """

    def __init__(self, race: GroupRace, task: Task, grouping: Grouping, name: str, known: _Known) -> None:
        self._race, self._name, self._known = race, name, known
        self.judged: _Known = {}
        self._fitting: list[tuple[float, Choices]] = []
        self._executions, self._budget_bytes = race.offloader.leanest(), task.budget_bytes
        self._table = table_of(race.offloader, self._executions, grouping, task.budget_bytes)

    def propose(self) -> Proposals:
        problem = self._table.problem
        nearest, uncounted_bytes = math.inf, 0
        for name, choices in [*fixed_policies(problem).items(), *self._race.others.items()]:
            verdict = yield from self._judged(name, choices)
            if verdict is not None and abs(verdict.peak_bytes - self._budget_bytes) < nearest:
                nearest = abs(verdict.peak_bytes - self._budget_bytes)
                uncounted_bytes = _uncounted(problem, choices, verdict)
        yield from self._judged(
            "ZeRO-1 offloaded", problem.choices(everything := set(range(len(problem.groups))), everything), whole=True
        )
        if nearest < math.inf:
            yield from self._chosen(uncounted_bytes)

    def _judged(
        self, name: str, choices: Choices, *, whole: bool = False
    ) -> Generator[Proposal, JudgedPlan | None, JudgedPlan | None]:
        """Propose a choice, unless it is one that was made for other groups, and return its plan."""
        choice = self._table.choice(choices)
        if (choice, whole) in self._known:
            verdict = self._known[choice, whole]
        else:
            name = f"{self._name}, {name}"
            found = lowered(self._race.offloader, self._executions, choice, whole=whole, method=name)
            verdict = yield replace(found, hide_at_once=not whole, baseline=True)
            self.judged[choice, whole] = verdict
        if verdict is not None and not whole and verdict.peak_bytes <= self._budget_bytes:
            self._fitting.append((verdict.time_s, choices))
        return verdict

    def _chosen(self, uncounted_bytes: int) -> Proposals:
        """Propose the greedy choice and the exact one, until the exact one fits and leaves little room."""
        problem = self._table.problem
        tried: set[tuple[GroupChoice, ...]] = set()
        for _ in range(ASKED):
            asked = replace(problem, fixed_bytes=max(0, uncounted_bytes))
            greedy, verdict = greedy_choices(asked), None
            if greedy is not None and greedy not in tried:
                tried.add(greedy)
                yield from self._judged("greedy", greedy)
            exact = exact_choice(asked, self._settings, start=self._start(asked) or greedy).choices
            if exact is not None and exact not in tried:
                tried.add(exact)
                verdict = yield from self._judged("exact", exact)
            if exact is None or verdict is None:
                return
            room_bytes = problem.device_budget - verdict.peak_bytes
            if 0 <= room_bytes <= LITTLE * problem.device_budget:
                return
            uncounted_bytes = _uncounted(problem, exact, verdict)

    def _start(self, asked: ShardingProblem) -> Choices | None:
        """Return the fastest choice that is known to fit, and fits in the table too, if there is one."""
        costs = CostModel(asked)
        fitting = [
            (time_s, choices)
            for time_s, choices in self._fitting
            if costs.device_bytes(choices) <= asked.device_budget and costs.host_total(choices) <= asked.host_budget
        ]
        return min(fitting, key=lambda known: known[0])[1] if fitting else None

    @property
    def _settings(self) -> SolverSettings:
        """Return the limits of the exact choice: a program of many groups has more time."""
        settings = self._race.settings
        more = max(1.0, len(self._table.problem.groups) / MANY)
        return replace(settings, time_limit_s=settings.time_limit_s * more)


def _uncounted(problem: ShardingProblem, choices: Choices, plan: JudgedPlan) -> int:
    """Return the bytes of a plan's peak that the table of groups does not count: activations, inputs and buffers."""
    return plan.peak_bytes - CostModel(replace(problem, fixed_bytes=0)).device_bytes(choices)
