"""Proposes what ZeRO, Elixir and the exact choice of four states make of groups, each as a plan of the same step.

Nothing that is chosen afterwards may be slower than any of them that fits: they are baselines. The exact choice is
asked with the sizes and times of the program's own plans, and asked again with less memory where the referee, which
counts row by row, finds that it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.elixir.on_fsdp2 import greedy_choices
from stowage.stages.formulations.sharding.fixed import fixed_policies
from stowage.stages.formulations.sharding.four_states.solve import exact_choice
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice
from stowage.stages.solve.collectives.group_table import groups_by_block, table_of
from stowage.stages.solve.collectives.groups import lowered
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.proposal import JudgedPlan, Proposal, Proposals, Task
from stowage.stages.solver.outcome import SolverSettings

ASKED = 3
"""Times that the exact choice is asked for."""

EFFORT = SolverSettings(time_limit_s=4.0, gap=5e-3)
"""Limits of each."""

LITTLE = 0.02
"""Share of the budget that the exact choice may leave."""

Choices = Sequence[GroupChoice]


@dataclass(frozen=True)
class GroupRace:
    """Proposes the choices for groups.

    Attributes:
        offloader: the program and its lower tier.
        members: the parameters of each group; by default those that a block reads first.
        root: the group that stays gathered, if there is one.
        others: choices that were made elsewhere, by name.
        settings: limits of the exact choice.
    """

    offloader: Offloader
    members: Sequence[frozenset[int]] = ()
    root: int | None = None
    others: Mapping[str, Choices] = field(default_factory=dict)
    settings: SolverSettings = EFFORT

    def propose(self, task: Task) -> Proposals:
        """Propose the fixed policies, the choices of others, the greedy choice, and exact ones.

        ZeRO-1 with states in the host is no choice of four states: gradients are whole until backward has ended.
        """
        executions, budget_bytes = self.offloader.leanest(), task.budget_bytes
        members = self.members or groups_by_block(self.offloader.program)
        if not members:
            return
        table = table_of(self.offloader, executions, members, budget_bytes, root=self.root)

        def plan(name: str, choices: Choices) -> Proposal:
            found = lowered(self.offloader, executions, table.choice(choices), method=f"groups, {name}")
            return replace(found, hide_at_once=True, baseline=True)

        nearest, uncounted_bytes = math.inf, 0
        for name, choices in [*fixed_policies(table.problem).items(), *self.others.items()]:
            verdict = yield plan(name, choices)
            if verdict is not None and abs(verdict.peak_bytes - budget_bytes) < nearest:
                nearest = abs(verdict.peak_bytes - budget_bytes)
                uncounted_bytes = _uncounted(table.problem, choices, verdict)
        on_host = table.choice(table.problem.choices(everything := set(range(len(members))), everything))
        name = "groups, ZeRO-1 offloaded"
        yield replace(lowered(self.offloader, executions, on_host, whole=True, method=name), baseline=True)
        if nearest < math.inf:
            yield from self._chosen(table.problem, uncounted_bytes, plan)

    def _chosen(
        self, problem: ShardingProblem, uncounted_bytes: int, plan: Callable[[str, Choices], Proposal]
    ) -> Proposals:
        """Propose the greedy choice and the exact one, until the exact one fits and leaves little room."""
        tried: set[tuple[GroupChoice, ...]] = set()
        for _ in range(ASKED):
            asked = replace(problem, fixed_bytes=max(0, uncounted_bytes))
            greedy = greedy_choices(asked)
            exact = exact_choice(asked, self.settings, start=greedy).choices
            verdict: JudgedPlan | None = None
            for name, choices in (("greedy", greedy), ("exact", exact)):
                if choices is not None and choices not in tried:
                    tried.add(choices)
                    verdict = yield plan(name, choices)
            if exact is None or verdict is None:
                return
            room_bytes = problem.device_budget - verdict.peak_bytes
            if 0 <= room_bytes <= LITTLE * problem.device_budget:
                return
            uncounted_bytes = _uncounted(problem, exact, verdict)


def _uncounted(problem: ShardingProblem, choices: Choices, plan: JudgedPlan) -> int:
    """Return the bytes of a plan's peak that the table of groups does not count: activations, inputs and buffers."""
    return plan.peak_bytes - CostModel(replace(problem, fixed_bytes=0)).device_bytes(choices)
