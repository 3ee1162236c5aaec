"""Makes orders of executions by greedy eviction, over the nodes of the whole step: no blocks and no options."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator

from stowage.stages.formulations.eviction.evict import Kept, Run, evict
from stowage.stages.formulations.eviction.rule import RULES, Rule
from stowage.stages.formulations.eviction.step import EvictionStep
from stowage.stages.ir.graph import SHARED
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.order import Order
from stowage.stages.solve.program.program import StepProgram

EVICTION = "greedy_eviction"
"""Name of its orders."""

TRIES = 3
"""Times that a rule is asked again with less: it does not count the states of random generators that are kept."""

SLOWER = 1.3
"""Factor by which an order may be slower than another one that fits, before what still fits is kept."""

SLOWEST = 1.6
"""Factor by which an order may be slower than one that computes nothing again."""

LEAN_RULES = 3
"""Rules that look for the least memory."""

GUIDED_RULES = 3
"""Rules that fill in what somebody has not decided."""

GUIDED_SLOWER = 1.15
"""Factor by which their order may be slower than another one that fits, before what still fits is kept."""

HALVINGS = 5
"""Steps of the search for the least memory of a rule."""


def eviction_step(program: StepProgram) -> EvictionStep:
    """Return the step as the rules see it: runs are legal for the referee, whichever values they drop."""
    nodes, count = program.nodes, len(program.nodes)
    writers: dict[int, list[int]] = defaultdict(list)
    last_reader: dict[int, int] = {}
    for node in nodes:
        for storage in node.mutates:
            writers[storage].append(node.node)
        for storage in program.consumed.intersection(node.reads):
            last_reader[storage] = node.node
    freed_bytes = [0] * count
    for storage, reader in last_reader.items():
        freed_bytes[reader] += program.nbytes[storage]
    last_again = []
    for node in nodes:
        lasting = [s for s in node.reads if s not in program.temporary and s not in node.mutates]
        ends = [w for s in lasting for w in writers.get(s, ()) if w > node.node]
        last_again.append(min([*ends, *(last_reader[s] for s in lasting if s in last_reader)], default=count))
    return EvictionStep(
        time_s=[n.time_s for n in nodes],
        workspace_bytes=[n.workspace_bytes for n in nodes],
        reads=[tuple(s for s in dict.fromkeys(r) if s not in n.creates) for r, n in zip(program.reads, nodes)],
        creates=[n.creates for n in nodes],
        takes=[n.takes for n in nodes],
        once=[n.once for n in nodes],
        last_again=last_again,
        freed_bytes=freed_bytes,
        nbytes=program.nbytes,
        stays=program.keep,
    )


class Evicting:
    """Makes orders of one program for any budget.

    Attributes:
        program: the program.
    """

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self._step = eviction_step(program)
        self._once_s = sum(n.time_s for n in program.nodes)

    def orders(
        self, budget_bytes: int, rules: int, fastest_s: float = math.inf, within_s: float = math.inf
    ) -> Iterator[Order]:
        """Yield the orders of the first so many rules that fit.

        Args:
            budget_bytes: bytes of the device.
            rules: how many rules are tried.
            fastest_s: the time of the fastest order that is known to fit.
            within_s: seconds after which no other rule is tried.
        """
        until_s = time.monotonic() + within_s
        for number, rule in enumerate(RULES[:rules]):
            if number and time.monotonic() > until_s:
                return
            found = self._order(rule, budget_bytes, min(SLOWER * fastest_s, SLOWEST * self._once_s))
            if found is not None:
                fastest_s = min(fastest_s, found.time_s)
                yield found

    def guided(self, budget_bytes: int, kept: Kept, fastest_s: float) -> Order | None:
        """Return the fastest order that fits and has decided values in memory at some nodes, as far as there is room.

        Args:
            budget_bytes: bytes of the device.
            kept: see `evict`.
            fastest_s: the time of the fastest order that is known to fit.
        """
        best: Order | None = None
        for rule in RULES[:GUIDED_RULES]:
            found = self._order(rule, budget_bytes, GUIDED_SLOWER * fastest_s, kept)
            if found is not None and (best is None or found.time_s < best.time_s):
                best = found
        return best

    def leanest(self, rules: int) -> Order | None:
        """Return the order with the lowest peak that the first so many rules find: with a byte less they find none.

        The memory of each is halved first, and then that of all of them.
        """
        best: Order | None = None
        peak_bytes = self.program.peak_bytes([Execution(n.node, EVICTION) for n in self.program.nodes]) + 1
        for rule in RULES[: min(rules, LEAN_RULES)]:
            low, within = self.program.base_bytes + self._step.least_bytes, peak_bytes - 1
            for halving in range(HALVINGS + 1):
                found = self._order(rule, within, SLOWEST * self._once_s)
                if found is not None:
                    best, peak_bytes = found, found.peak_bytes
                elif halving:
                    low = within
                else:
                    break  # it does not get below the rules before it
                within = (low + peak_bytes) // 2
        return best if best is None else self._lowest(best, rules)

    def _lowest(self, best: Order, rules: int) -> Order:
        """Return an order, no larger than this one, with a byte less than whose peak the rules find none.

        It is searched ever further down, and halved.
        """
        floor = self.program.base_bytes + self._step.least_bytes - 1
        step, low = 1, floor
        while best.peak_bytes - low > 1:
            found = next(self.orders(max(low + 1, best.peak_bytes - step), rules), None)
            if found is None:
                low = max(low + 1, best.peak_bytes - step)
            else:
                best = found
                low = low if best.peak_bytes > low else floor  # an order may fit where it was not found
            step = max(1, min(2 * step, (best.peak_bytes - low) // 2))
        return best

    def _order(self, rule: Rule, budget_bytes: int, limit_s: float, kept: Kept | None = None) -> Order | None:
        """Return the order of a rule, if it fits."""
        within = budget_bytes
        for _ in range(TRIES):
            runs = evict(self._step, rule, within - self.program.base_bytes, limit_s, kept)
            if runs is None:
                return None
            executions = self.program.without_dead([self._execution(run) for run in runs])
            peak_bytes = self.program.peak_bytes(executions)
            if peak_bytes <= budget_bytes:
                time_s = sum(self.program.nodes[e.node].time_s for e in executions)
                return Order(EVICTION, executions, time_s, peak_bytes)
            within -= peak_bytes - budget_bytes
        return None

    def _execution(self, run: Run) -> Execution:
        during = self.program.nodes[min(run.during, len(self.program.nodes) - 1)]
        if during.block == SHARED:
            label = "updates" if during.phase == "update" else "shared"
        else:
            label = f"{'F' if during.phase == 'forward' else 'B'}{during.block}"
        return Execution(run.node, label)
