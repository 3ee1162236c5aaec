"""Proposes plans by greedy eviction: the fastest within the budget, and where nothing fits the leanest."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from stowage.stages.solve.in_memory import OrderMaker, order_maker_of
from stowage.stages.solve.judged_plans import JudgedPlans
from stowage.stages.solve.program.evicting import Evicting
from stowage.stages.solve.program.order import Order
from stowage.stages.solve.proposal import Decision, Proposal, Proposals, Task
from stowage.stages.solve.time_share import EVICTION, share_of_planning


@dataclass(frozen=True)
class GreedyEviction:
    """Proposes the fastest plan that the rules find within the budget.

    Attributes:
        everything: the order that computes nothing again.
        plans: what was judged so far.
    """

    everything: Order
    plans: JudgedPlans

    def propose(self, task: Task) -> Proposals:
        """Propose it, unless nothing need be computed again."""
        rules, budget_bytes = task.request.eviction_rules, task.budget_bytes
        if not rules or self.everything.peak_bytes <= budget_bytes:
            return
        maker = order_maker_of(task)
        fastest_s = min((p.time_s for p in self.plans.fitting if p.tier is None), default=math.inf)
        within_s = share_of_planning(EVICTION, task.request.planning_since_s, time.monotonic()) / task.request.ways
        orders = [maker.polished(o) for o in _evicting(maker).orders(budget_bytes, rules, fastest_s, within_s)]
        if orders:
            yield _proposal(task, min(orders, key=lambda o: (o.time_s, o.peak_bytes)))


@dataclass(frozen=True)
class LeastEvicted:
    """Proposes the plan that takes least memory: to know the smallest budget, and with what still fits kept."""

    def propose(self, task: Task) -> Proposals:
        """Propose it, and where it fits propose it with what still fits kept."""
        maker, rules = order_maker_of(task), task.request.eviction_rules
        least = task.known.once("least evicted", lambda: _evicting(maker).leanest(rules) if rules else None)
        if least is None:
            return
        yield task.known.of(least, "proposal", lambda order: replace(_proposal(task, order), only_bound=True))
        if least.peak_bytes <= task.budget_bytes:
            yield _proposal(task, maker.polished(least))


def _evicting(maker: OrderMaker) -> Evicting:
    return maker.known.once("evicting", lambda: Evicting(maker.program))


def _proposal(task: Task, order: Order) -> Proposal:
    steps = task.program.steps(order.executions)
    return Proposal(method=order.method, steps=steps, decision=Decision(order.method))
