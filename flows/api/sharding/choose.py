"""Chooses the state of each group of parameters: where its shards live, and whether its gathered weights are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.formulations.sharding.race import Contestant, Judged, race
from stowage.stages.ir.errors import Infeasible, Occupant
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.fsdp2 import simulate_fsdp2
from stowage.stages.simulate.parallel.memory import RankRules, rank_memory
from stowage.stages.solver.outcome import SolverSettings

SECONDS = 30.0
"""Time limit of the exact choice."""

_IMPROVED = ", improved"

_STATES = ((False, True), (False, False), (True, True))
"""Where the shards live, and whether gathered weights are kept, the fastest first."""

ROUNDS = 4
"""How often the exact choice is made with a smaller budget, where the replay finds that it needs more."""


@dataclass(frozen=True)
class Chosen:
    """A choice, and what it takes.

    Attributes:
        name: who made the choice: the exact model, Elixir's greedy search, or a fixed policy.
        choices: the state of each group.
        time_s: time of a step.
        device_bytes: most bytes on a device.
        moment: when that is.
        host_bytes: bytes in the host, of all ranks together.
    """

    name: str
    choices: tuple[GroupChoice, ...]
    time_s: float
    device_bytes: int
    moment: str
    host_bytes: int


@dataclass(frozen=True)
class Situation:
    """What there is to choose for.

    Attributes:
        groups: the groups of parameters.
        machine: the ranks and their rates.
        device_budget_bytes, host_budget_bytes: the budgets of a device and of the host.
        fixed_bytes: bytes of buffers and of the batch on each device.
        prefetch: groups that are gathered ahead.
        on_cpu: the devices are CPUs: their memory is the host's, and gloo copies what it works on.
        micro_batches: forwards and backwards before an update.
    """

    groups: tuple[ParameterGroup, ...]
    machine: ParallelMachine
    device_budget_bytes: int
    host_budget_bytes: int
    fixed_bytes: int
    prefetch: int
    on_cpu: bool
    micro_batches: int = 1

    def judge(self, choices: Sequence[GroupChoice]) -> Judged:
        """Time a choice, and replay its memory."""
        found = self.describe("", choices)
        return Judged(found.time_s, found.device_bytes, found.host_bytes)

    def describe(self, name: str, choices: Sequence[GroupChoice]) -> Chosen:
        """Return a choice with its time and memory."""
        outcome = simulate_fsdp2(
            self.groups,
            choices,
            self.machine,
            micro_batches=self.micro_batches,
            ahead=self.prefetch,
            fixed_bytes=self.fixed_bytes,
        )
        rules = RankRules(
            self.machine.ranks,
            self.prefetch,
            copies=self.on_cpu,
            host_is_device=self.on_cpu,
            accumulated=self.micro_batches > 1,
        )
        memory = rank_memory(self.groups, choices, rules, fixed_bytes=self.fixed_bytes)
        host = memory.host_bytes * self.machine.ranks
        return Chosen(name, tuple(choices), outcome.time_s, memory.device_bytes, memory.moment, host)


def choose(situation: Situation) -> Chosen:
    """Return the fastest choice that fits both budgets: the exact one, Elixir's own, or a fixed policy.

    Raises:
        Infeasible: none fits.
    """
    problem = ShardingProblem(
        situation.groups,
        situation.machine,
        situation.device_budget_bytes,
        situation.host_budget_bytes,
        micro_batches=situation.micro_batches,
        ahead=situation.prefetch,
        fixed_bytes=situation.fixed_bytes,
        copies=situation.on_cpu,
        host_is_device=situation.on_cpu,
    )
    best: Contestant | None = None
    least: Contestant | None = None
    for _ in range(ROUNDS):
        result = race(problem, situation.judge, SolverSettings(time_limit_s=SECONDS))
        fitting = [c for c in result.contestants if _fits(c, situation)]
        for contestant in fitting:
            if best is None or contestant.judged.time_s < best.judged.time_s:
                best = contestant
        least = min([*result.contestants, *([least] if least else [])], key=lambda c: c.judged.device_bytes)
        exact = next((c for c in result.contestants if c.name == "exact"), None)
        if exact is None or _fits(exact, situation):
            break
        excess = exact.judged.device_bytes - situation.device_budget_bytes
        if excess <= 0 or problem.device_budget <= excess:
            break
        problem = replace(problem, device_budget=problem.device_budget - excess)
    if best is None:
        assert least is not None
        smallest = situation.describe(least.name, least.choices)
        raise Infeasible(
            situation.device_budget_bytes,
            smallest.device_bytes,
            smallest.moment,
            [Occupant(_name(g), g.elements * g.compute_bytes) for g in _largest(situation.groups)],
        )
    return _improved(situation, situation.describe(best.name, best.choices))


def _improved(situation: Situation, chosen: Chosen) -> Chosen:
    """Change the state of one group after the other, the last first, where that is faster and fits.

    The exact model counts memory at fewer moments than the replay does, so that it may leave some of a budget unused.
    """
    name = f"{chosen.name.removesuffix(_IMPROVED)}{_IMPROVED}"
    for place in reversed(range(len(situation.groups))):
        for state in _STATES:
            choices = list(chosen.choices)
            if choices[place].on_host < state[0] or (situation.groups[place].is_root and not state[1]):
                continue
            choices[place] = GroupChoice(choices[place].group, *state)
            other = situation.describe(name, choices)
            fits = other.device_bytes <= situation.device_budget_bytes
            if fits and other.host_bytes <= situation.host_budget_bytes and other.time_s < chosen.time_s:
                chosen = other
    return chosen


def _fits(contestant: Contestant, situation: Situation) -> bool:
    judged = contestant.judged
    return judged.device_bytes <= situation.device_budget_bytes and judged.host_bytes <= situation.host_budget_bytes


def _largest(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    return sorted(groups, key=lambda g: -g.elements * g.compute_bytes)[:3]


def _name(group: ParameterGroup) -> str:
    return f"the weights of {' + '.join(m or 'the model itself' for m in group.modules)}"
