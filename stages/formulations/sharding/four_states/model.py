"""The exact choice: which of its four states each group of parameters has, so that a step is shortest.

| symbol | here | meaning | unit |
|---|---|---|---|
| x[g,σ] | `state` | group g has state σ | 0/1 |
| u | `uses` | uses in the order of a step: forward of each group, then backward of each in reverse | – |
| a | `ahead` | uses that are gathered ahead | – |
| R[u] | `reloaded` | the shards of use u are on the device | time unit |
| A[u] | `gathered` | its weights are gathered | time unit |
| C[u] | `computed` | it has computed | time unit |
| D[u] | `reduced` | its gradients are reduced | time unit |
| O[u] | `offloaded` | its gradients are on the host | time unit |
| W[u] | `free` | computing may go on: C[u], and with micro-batches O[u] where use u offloads | time unit |
| T | `end` | forward and backward have ended on all lanes | time unit |
| r, g, d, o [u,σ] | `Durations` | how long each lane is busy with use u in state σ (`cost_model`) | s |
| M[k,g,σ] | `Moment` | bytes on a device at moment k; as rows of the program `device_rows`, `host_rows` | bytes |
| – | `resting`, `late` | use u needs no copy and no gather; how far lanes can be behind it | 0/1, time unit |

Moments in time are the smallest that the rows allow, so that T is the length of the longest path through the lanes:
what the referee's recursion gives. With one rank there are no collectives: A[u] is R[u] and D[u] is C[u]. Where
collectives and copies share a link, all of them are one sequence of events (`link`), in the order in which they are
asked for.

This is no equation of the Elixir paper, which counts every transfer as if nothing overlapped, and fills memory with
what saves most for each byte.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from stowage.stages.formulations.sharding.cost_model import CostModel, Durations
from stowage.stages.formulations.sharding.four_states.memory_rows import row_of
from stowage.stages.formulations.sharding.memory import State
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.solver.milp import pulp

Lane = Literal["reload", "gather", "reduce", "offload"]


class Use(NamedTuple):
    """A use of a group."""

    group: int
    backward: bool


class Event(NamedTuple):
    """Something that occupies the link, of a use."""

    lane: Lane
    use: int


class FourStates:
    """Holds data and variables."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem, self.costs = problem, CostModel(problem)
        groups = problem.groups
        self.uses = [Use(i, False) for i in range(len(groups))] + [Use(i, True) for i in reversed(range(len(groups)))]
        self.turn = len(groups)
        self.ahead = problem.ahead
        self.device_rows = [row_of(moment, problem, problem.device_budget) for moment in self.costs.moments]
        self.host_rows = [row_of(self.costs.host_moment, problem, problem.host_budget)]
        self.time_unit = max(sum(g.forward_s + g.backward_s for g in groups), 1e-9)
        self.model = pulp.LpProblem("four_states", pulp.LpMinimize)
        self.state = {
            (i, s): pulp.LpVariable(
                f"x_{i}_{'host' if s.on_host else 'device'}_{'keep' if s.keep else 'reshard'}", cat="Binary"
            )
            for i in range(len(groups))
            for s in self.costs.states(i)
        }
        self.reloaded, self.gathered = self._moments("R"), self._moments("A")
        self.computed, self.reduced, self.offloaded = self._moments("C"), self._moments("D"), self._moments("O")
        self.waits = problem.micro_batches > 1
        """Computing waits for offloads: the host adds to a gradient that it has already."""
        self.free = self._moments("W", self.turn) if self.waits else self.computed
        self.end = pulp.LpVariable("T", lowBound=0)

    def _moments(self, name: str, first: int = 0) -> list[Any]:
        """Make a variable for each use; before `first` it is the moment at which the use has computed."""
        found = [pulp.LpVariable(f"{name}_{u}", lowBound=0) for u in range(first, len(self.uses))]
        return [*self.computed[:first], *found] if first else found

    def durations(self, u: int, state: State) -> Durations:
        """Return how long the lanes are busy with a use."""
        use = self.uses[u]
        return self.costs.backward(use.group, state) if use.backward else self.costs.forward(use.group, state)

    def lane_time(self, u: int, lane: Lane) -> Any:
        """Return the time that a use occupies a lane for, in time units."""
        i = self.uses[u].group
        return pulp.lpSum(
            seconds / self.time_unit * self.state[i, s]
            for s in self.costs.states(i)
            if (seconds := getattr(self.durations(u, s), f"{lane}_s"))
        )

    def compute_time(self, u: int) -> Any:
        """Return the time that a use computes for, in time units, slowed down by its collectives."""
        group = self.problem.groups[self.uses[u].group]
        alone = (group.backward_s if self.uses[u].backward else group.forward_s) / self.time_unit
        slowdown = self.problem.machine.collective_slowdown
        if not slowdown:
            return alone
        return alone + slowdown * (self.lane_time(u, "gather") + self.lane_time(u, "reduce"))

    def update_time(self, *, on_host: bool) -> Any:
        """Return the time of all updates by the host, or by the devices, in time units."""
        found = [(self.costs.update_s(i, s), x) for (i, s), x in self.state.items() if s.on_host == on_host]
        return pulp.lpSum(seconds / self.time_unit * x for seconds, x in found)

    def begin(self, u: int) -> Any:
        """Return the moment from which a use may be gathered: `ahead` uses before have begun, in its own phase."""
        first = self.turn if u >= self.turn else 0
        before = max(u - self.ahead, first) - 1
        return self.free[before] if before >= 0 else 0

    def resting(self, u: int) -> Any:
        """Return 1 where a use is neither copied to the device nor gathered, because its weights are there already."""
        i = self.uses[u].group
        return pulp.lpSum(self.state[i, s] for s in self.costs.states(i) if not self._moves(u, s))

    def _moves(self, u: int, state: State) -> bool:
        durations = self.durations(u, state)
        return durations.reload_s > 0 or durations.gather_s > 0

    def late(self, u: int) -> float:
        """Return how far the link can be behind computing when a use begins.

        Gathers of earlier uses have ended when these computed; their reductions may be waiting still, and where copies
        use the same link, their offloads too.
        """
        first = self.turn if u >= self.turn else 0
        most = 0.0
        for before in range(first, u):
            found = [self.durations(before, s) for s in self.costs.states(self.uses[before].group)]
            shared = self.problem.machine.collectives_share_link
            most += max(d.reduce_s + (d.offload_s if shared else 0.0) for d in found)
        return most / self.time_unit

    def offloads(self, u: int) -> Any:
        """Return 1 where a use offloads gradients."""
        i = self.uses[u].group
        return pulp.lpSum(self.state[i, s] for s in self.costs.states(i) if self.durations(u, s).offload_s > 0)

    def busy(self) -> float:
        """Return more than the lanes can be behind computing in backward: everything that it asks for."""
        most = 0.0
        for u in range(self.turn, len(self.uses)):
            found = [self.durations(u, s) for s in self.costs.states(self.uses[u].group)]
            most += max(d.reload_s + d.gather_s + d.reduce_s + d.offload_s for d in found)
        return most / self.time_unit

    def asked(self) -> list[Event]:
        """List what occupies the link of collectives, in the order in which it is asked for.

        These are the collectives, unless there is one rank; and the copies, where they share that link.
        """
        events: list[Event] = []
        for first in (0, self.turn):
            last = first + self.turn
            for u in range(first, min(first + self.ahead, last)):
                events += [Event("reload", u), Event("gather", u)]
            for u in range(first, last):
                if u + self.ahead < last:
                    events += [Event("reload", u + self.ahead), Event("gather", u + self.ahead)]
                events += [Event("reduce", u), Event("offload", u)]
        machine = self.problem.machine
        lanes = {"reload", "offload"} if machine.collectives_share_link else set[Lane]()
        if machine.ranks > 1:
            lanes |= {"gather", "reduce"}
        return [e for e in events if e.lane in lanes]
