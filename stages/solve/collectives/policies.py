"""Proposes the fixed policies of sharded training: what is gathered stays until backward, or is gathered again.

ZeRO-2 keeps gathered weights from forward to backward, ZeRO-3 gathers them again (`reshard`). Between them, as Elixir's
rCache does, the last groups of forward, which backward needs first, are kept and the others gathered again. ZeRO-1
keeps weights like ZeRO-2, and gradients whole until backward has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.solve.in_memory import OrderMaker, order_maker_of
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.order import Order
from stowage.stages.solve.proposal import Decision, Proposal, Proposals, Task

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of the gathered weights that are kept until backward, the last ones of forward."""


@dataclass(frozen=True)
class ShardingPolicies:
    """Proposes the policies that fit the budget, from orders that recompute nothing and that recompute everything.

    Attributes:
        orders: the orders to start from.
    """

    orders: Sequence[Order]

    def propose(self, task: Task) -> Proposals:
        """Propose each policy that fits."""
        maker = order_maker_of(task)
        seen: set[tuple[Execution, ...]] = set()
        for order in self.orders:
            for name, executions in self._variants(maker, order):
                if tuple(executions) in seen:  # all weights are gathered again already
                    continue
                seen.add(tuple(executions))
                found = maker.counted(Order(name, executions, 0.0, 0, order.options))
                if found.peak_bytes <= task.budget_bytes:
                    steps = task.program.steps(found.executions)
                    yield Proposal(method=name, steps=steps, decision=Decision(name))

    def _variants(self, maker: OrderMaker, order: Order) -> Iterator[tuple[str, list[Execution]]]:
        yield order.method, list(order.executions)
        nodes = maker.program.nodes
        whole = gradients_whole(order.executions, nodes)
        if whole != list(order.executions):
            yield f"{order.method}, gradients whole", whole
        gathered = [e.node for e in _first_runs(order.executions) if is_gather(nodes[e.node])]
        for share in SHARES:
            kept = frozenset(gathered[len(gathered) - int(share * len(gathered)) :])
            name = f"{order.method}, reshard" + (f" but the last {share:.0%}" if share else "")
            yield name, gathered_again(order.executions, nodes, kept)


def is_gather(node: ComputeNode) -> bool:
    """Say whether a node gathers weights, which can be done again at any time before their update."""
    return node.collective and node.phase == "forward" and not node.once


def _first_runs(executions: Sequence[Execution]) -> list[Execution]:
    seen: set[int] = set()
    found = []
    for execution in executions:
        if execution.node not in seen:
            seen.add(execution.node)
            found.append(execution)
    return found


def gradients_whole(executions: Sequence[Execution], nodes: Sequence[ComputeNode]) -> list[Execution]:
    """Return an order in which gradients are scattered, and parameters updated, when all gradients are complete."""
    return sorted(executions, key=lambda execution: nodes[execution.node].phase == "update")


def gathered_again(
    executions: Sequence[Execution], nodes: Sequence[ComputeNode], kept: frozenset[int] = frozenset()
) -> list[Execution]:
    """Return an order in which weights are gathered again for backward, but for the gathers in `kept`.

    A gather runs again before the first node that reads its weights after backward has begun, where it has not run
    again already.
    """
    maker = {s: n.node for n in nodes if is_gather(n) for s in n.creates}
    before_backward: set[int] = set()
    begun = False
    found: list[Execution] = []
    for execution in executions:
        node = nodes[execution.node]
        begun = begun or node.phase == "backward"
        if is_gather(node):
            (before_backward.discard if begun else before_backward.add)(node.node)
        for gather in dict.fromkeys(maker[s] for s in node.reads if s in maker) if begun else ():
            if gather in before_backward and gather not in kept:
                found.append(Execution(gather, execution.label, execution.step))
                before_backward.discard(gather)
        found.append(execution)
    return found
