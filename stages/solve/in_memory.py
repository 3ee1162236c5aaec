"""Proposes plans without the lower tier: RK-Rotor, with finer and finer slots of memory, and the fixed policies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from stowage.stages.formulations.chain.policies import fixed_policies
from stowage.stages.formulations.chain.rk_rotor import HEADROOM, ChainStep, RkRotor
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.plan import Option
from stowage.stages.solve.known import Known
from stowage.stages.solve.program.chain import Chain, Execution, once
from stowage.stages.solve.program.order import Order
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import Decision, Proposal, Proposals, Task
from stowage.stages.solve.request import COMPARED, FIXED, PlanRequest

ORDERS_COMPARED = 12
"""How many of RK-Rotor's orders that fit are polished and compared."""

LEVELS_PASSED_OVER = 8
"""Plans passed over at a time until one fits: most plans beyond the budget do not."""

ORDERS_TO_OFFLOAD_FROM = 6
"""Orders of executions, from much memory to little, from which Belady's rule offloads."""

FAR_SLOWER = 4.0
"""The leanest order is not polished where it takes so many times what another one that fits does.

Of a hundred layers it computes for twelve times as long, and polishing it took a fifth of planning.
"""

ROTOR = "rockmate"
"""Name of RK-Rotor's orders, unless another was asked for."""


class OrderMaker:
    """Makes orders of executions, and keeps what the budget admits."""

    def __init__(
        self,
        program: StepProgram,
        chain: Chain,
        budget_bytes: int,
        *,
        polishes: bool = True,
        known: Known | None = None,
    ) -> None:
        """Prepare to make orders.

        Args:
            program: the program of the step.
            chain: its blocks with their options.
            budget_bytes: bytes of the device.
            polishes: keep what still fits instead of making it again.
            known: what was found for the same program and chain within other budgets.
        """
        self.program = program
        self.chain = chain
        self.budget_bytes = budget_bytes
        self.polishes = polishes
        self.known = known if known is not None else Known()

    def order(self, method: str, steps: Sequence[ChainStep]) -> Order:
        """Return the order of a sequence of the chain's steps, which runs no more than it must."""
        options = frozenset((s.block, s.option) for s in steps if s.kind in ("forward", "backward"))
        executions = self.program.without_dead(self.chain.executions(steps))
        return self.counted(Order(method, executions, 0.0, 0, options))

    def counted(self, order: Order) -> Order:
        """Return an order with what its executions cost."""
        time_s = sum(self.program.nodes[e.node].time_s for e in order.executions)
        return replace(order, time_s=time_s, peak_bytes=self.program.peak_bytes(order.executions))

    def polished(self, order: Order) -> Order:
        """Return an order with what still fits kept instead of made again."""
        if not self.polishes or order.peak_bytes > self.budget_bytes:
            return order
        kept = self.program.retain_where_possible(order.executions, self.budget_bytes)
        return order if kept is order.executions else self.counted(replace(order, executions=kept))

    def table(self, nominal_bytes: int, slots: int) -> RkRotor:
        """Return RK-Rotor's table for so much memory."""
        return RkRotor(self.chain.chain_blocks, slots, max(1, -(-nominal_bytes // slots)))

    def rockmate(self, available_bytes: int, slots: int, *, polish: bool = True) -> Iterator[Order]:
        """Yield RK-Rotor's orders that truly fit, one per distinct time, from the largest nominal memory down."""
        table = self.table(int(available_bytes * HEADROOM), slots)
        smallest = table.smallest_slots()
        if smallest is None:
            return
        levels = [m for m in range(slots, smallest - 1, -1) if m == slots or table.time_s(m) != table.time_s(m + 1)]

        @cache
        def steps(level: int) -> tuple[ChainStep, ...]:
            return tuple(table.sequence(levels[level]))

        @cache
        def order(level: int) -> Order:
            return self.order(ROTOR, steps(level))

        def fits(level: int) -> bool:
            # Tables for other budgets have many of the same sequences.
            peak_bytes = self.known.once(("peak", steps(level)), lambda: order(level).peak_bytes)
            return peak_bytes <= self.budget_bytes

        coarse = next((k for k in range(0, len(levels), LEVELS_PASSED_OVER) if fits(k)), 0)
        fitting = (k for k in range(max(0, coarse - LEVELS_PASSED_OVER + 1), len(levels)) if fits(k))
        for level in islice(fitting, ORDERS_COMPARED):
            yield self.polished(order(level)) if polish else order(level)

    def smallest(self, nominal_bytes: int, slots: int) -> Order | None:
        """Return the order with the lowest true peak among RK-Rotor's tightest, with ever finer slots of memory."""
        return self.known.once(("smallest", nominal_bytes, slots), lambda: self._smallest(nominal_bytes, slots))

    def _smallest(self, nominal_bytes: int, slots: int) -> Order | None:
        best: Order | None = None
        for _ in range(3):
            table = self.table(nominal_bytes, slots)
            least = table.smallest_slots()
            if least is None:
                break
            for m in range(least, min(least + 4, slots) + 1):
                order = self.order(ROTOR, table.sequence(m))
                if best is None or (order.peak_bytes, order.time_s) < (best.peak_bytes, best.time_s):
                    best = order
            nominal_bytes = (least + 1) * table.slot_bytes
        return best

    def tighten(self, smallest: Order, overhead_bytes: int, slots: int) -> Order:
        """Tighten the budget to one byte below the current peak until no order fits; return the last one that did.

        Args:
            smallest: the order to start from.
            overhead_bytes: in memory besides what RK-Rotor counts.
            slots: memory slots of RK-Rotor.
        """
        found: Order = self.known.of(
            smallest, f"tightened {overhead_bytes} {slots}", lambda order: self._tighten(order, overhead_bytes, slots)
        )
        return found

    def _tighten(self, smallest: Order, overhead_bytes: int, slots: int) -> Order:
        while True:
            budget_bytes = smallest.peak_bytes - 1
            maker = OrderMaker(self.program, self.chain, budget_bytes, polishes=self.polishes, known=self.known)
            found = list(maker.rockmate(max(budget_bytes - overhead_bytes, 1), slots, polish=False))
            if not found:
                return smallest
            smallest = min(found, key=lambda p: (p.peak_bytes, p.time_s))


def order_maker_of(task: Task) -> OrderMaker:
    """Return what makes the orders of a task."""
    return OrderMaker(task.program, task.chain, task.budget_bytes, polishes=task.request.polishes, known=task.known)


def _policies(maker: OrderMaker) -> list[Order]:
    """Return the orders of the fixed policies."""
    return [maker.order(name, steps) for name, steps in fixed_policies(maker.chain.chain_blocks).items()]


def policy_orders(maker: OrderMaker, everything: Order) -> list[Order]:
    """Return the order that computes nothing again, and those of the fixed policies."""
    return [everything, *maker.known.once("policies", lambda: _policies(maker))]


def keep_everything(maker: OrderMaker) -> Order:
    """Return the order that computes nothing again: eager's, or block by block if that is no slower."""
    known = maker.known
    eager = Order("keep_all", [Execution(n.node, "keep") for n in maker.program.nodes], 0.0, 0)
    everything = known.once("everything", lambda: maker.counted(eager))
    by_block = known.once("by block", lambda: maker.order("keep_all", once(maker.chain.fastest_options)))
    labelled = maker.polished(by_block)
    return labelled if labelled.time_s <= everything.time_s else everything


@dataclass(frozen=True)
class InMemory:
    """Proposes plans that keep everything on the device.

    Attributes:
        everything: the order that computes nothing again.
        method: the method of planning.
        slots: memory slots of RK-Rotor.
        only_bound: only the leanest plan is wanted, to know the smallest budget.
    """

    everything: Order
    method: str
    slots: int
    only_bound: bool = False

    def propose(self, task: Task) -> Proposals:
        """Propose the fastest plan within the budget, and the leanest of all."""
        maker = order_maker_of(task)
        orders, leanest = self._orders(maker, is_mixture=task.request.is_mixture)
        fitting = [o for o in orders if o.peak_bytes <= task.budget_bytes]
        if fitting and not self.only_bound:
            best = min(fitting, key=lambda o: (o.time_s, o.method != "keep_all", o.peak_bytes))
            verdict = yield self._proposal(task, best)
            if verdict is None or verdict.peak_bytes > task.budget_bytes:
                raise AssertionError(
                    f"the referee finds that the plan of {best.method} does not fit, but it was counted"
                )
        yield task.known.of(leanest, "proposal", lambda order: replace(self._proposal(task, order), only_bound=True))

    def _proposal(self, task: Task, order: Order) -> Proposal:
        method = self.method if order.method == ROTOR and self.method != "auto" else order.method
        decision = decided_by_options(order, task.chain, task.request)
        return Proposal(method=method, steps=task.program.steps(order.executions), decision=decision)

    def _orders(self, maker: OrderMaker, *, is_mixture: bool) -> tuple[list[Order], Order]:
        """Return orders to choose from, and the one that takes least memory: of a mixture, of those that were made."""
        budget_bytes, everything, slots, method = maker.budget_bytes, self.everything, self.slots, self.method
        base_bytes = maker.program.base_bytes
        policies = maker.known.once("policies", lambda: _policies(maker))
        if method in FIXED:
            found = [p for p in (everything, *policies) if p.method == method]
            if not found:
                raise ParameterError(
                    f"method {method} needs a chain of two blocks at least, each of which may run again."
                )
            return found, found[0]
        # In memory besides what RK-Rotor counts.
        inside = (s for b in maker.chain.blocks for s in b.storages)
        overhead_bytes = base_bytes + maker.known.once("uncounted", lambda: maker.program.uncounted_bytes(inside))
        smallest = maker.smallest(max(everything.peak_bytes - base_bytes, 1), slots) or everything
        known = [everything, *policies] if method not in COMPARED else []
        smallest = min([smallest, *known], key=lambda p: (p.peak_bytes, p.time_s))
        if not is_mixture:
            smallest = maker.tighten(smallest, overhead_bytes, slots)
        orders = []
        if method == "auto":
            orders.append(everything)
        if method != "auto" or everything.peak_bytes > budget_bytes:
            orders += maker.rockmate(max(budget_bytes - overhead_bytes, 1), slots)
            if method == "auto":
                orders += [maker.polished(policy) for policy in policies]
        fastest_s = min((o.time_s for o in orders if o.peak_bytes <= budget_bytes), default=math.inf)
        if smallest.time_s <= FAR_SLOWER * fastest_s:
            orders.insert(0, maker.polished(replace(smallest, method=ROTOR)))
        return orders, smallest


def decided_by_options(order: Order, chain: Chain, request: PlanRequest) -> Decision:
    """Return who decided an order: the rule that put blocks in it, and whoever found their schedules.

    The least proven of those schedules counts for all. An order that keeps everything needs no proof, for none is
    faster.
    """
    used = [o for o in chain.options_of(order.options) if o.formulation != "keep_all"]
    solved = [o for o in used if o.status in ("optimal", "feasible")]
    rule = "rk_rotor" if order.method == ROTOR else order.method
    names = [rule, *sorted({o.formulation for o in used})]
    limits = request.options_limits
    return Decision(
        ", ".join(dict.fromkeys(names)),
        _worst_status(rule, used),
        max((o.gap for o in solved), default=None) if len(solved) == len(used) and rule == "rk_rotor" else None,
        limits.time_limit_s if solved else 0.0,
        limits.seed if solved else 0,
    )


def _worst_status(rule: str, used: Sequence[Option]) -> str:
    if rule != "rk_rotor" or not used or any(o.status not in ("optimal", "feasible") for o in used):
        return "heuristic"
    return "feasible" if any(o.status == "feasible" for o in used) else "optimal"


def orders_to_offload_from(maker: OrderMaker, everything: Order, slots: int) -> Iterator[list[Execution]]:
    """Yield executions from which Belady's rule may offload: all kept, then RK-Rotor's for less and less memory."""
    yield everything.executions
    table = maker.table(max(everything.peak_bytes - maker.program.base_bytes, 1), slots)
    least = table.smallest_slots()
    if least is None:
        return
    previous = everything.time_s
    for k in range(ORDERS_TO_OFFLOAD_FROM):
        m = slots - (slots - least) * (k + 1) // ORDERS_TO_OFFLOAD_FROM
        if table.time_s(m) > previous:
            previous = table.time_s(m)
            yield maker.program.without_dead(maker.chain.executions(table.sequence(m)))
