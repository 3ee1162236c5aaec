"""Finds the forward node each backward node of a block belongs to, so that a cluster has its backward part with it.

The thesis takes the pair from autograd (3.2.1). A trace has no such link, so it is read off the data: the backward of
an operation reads what that operation read or made, and comes after the backward of what consumed its result. Owners
never rise along an edge between backward nodes; clusters that follow each other forward therefore follow each other
backward, in the opposite order.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.block import BlockGraph


def owners(block: BlockGraph, order: Sequence[int]) -> list[int]:
    """Return, for each backward node, the place in `order` of the forward node it belongs to.

    Args:
        block: the block.
        order: the block's forward nodes in the order in which clusters run them.
    """
    place = {k: p for p, k in enumerate(order)}
    last, first = len(order) - 1, block.forward_count
    creator = block.creator()
    readers = block.readers()
    found: list[int | None] = []
    least = last
    late = ending(block)
    for number, node in enumerate(block.nodes[first:], first):
        makers = [creator[a] for a in node.reads if a in creator]
        before = [o for k in makers if k >= first and (o := found[k - first]) is not None]
        bound = min(before, default=last)
        # An update comes after everything that might need the old parameter again, and what reads a gradient that waits
        # comes after what adds to it.
        ends = not node.creates or number in late
        bound = min(bound, least) if ends else bound
        touched = [
            max((p for p in _uses(k, a, readers, place) if p <= bound), default=-1)
            for a, k in ((a, creator[a]) for a in node.reads if a in creator)
            if k < first
        ]
        nearest = max(touched, default=-1)
        waits = any(a not in creator for a in node.reads)  # it reads a gradient that arrives from outside
        known = bool(before or nearest >= 0 or waits or ends)
        owner = (nearest if nearest >= 0 else bound) if known else None
        found.append(owner)
        if owner is not None:
            least = min(least, owner)
    # Nodes that depend on nothing run when their first reader needs them.
    for i in range(len(found) - 1, -1, -1):
        if found[i] is None:
            after = [found[r - first] for a in block.nodes[first + i].creates for r in readers[a]]
            found[i] = max((o for o in after if o is not None), default=last)
    return [o if o is not None else last for o in found]


def ending(block: BlockGraph) -> frozenset[int]:
    """Return the nodes behind an update or addition which read nothing of the block, and on which only updates depend.

    They are norms and scatters of gradients that wait: nothing in the block says that they come after the additions.
    """
    readers, first = block.readers(), block.forward_count
    leads = set[int]()
    for k in range(len(block.nodes) - 1, first - 1, -1):
        node = block.nodes[k]
        if not node.creates or all(r in leads for a in node.creates for r in readers[a]):
            leads.add(k)
    changes = [k for k in range(first, len(block.nodes)) if not block.nodes[k].creates]
    begin = changes[0] if changes else len(block.nodes)
    return frozenset(k for k in leads if k > begin and block.nodes[k].creates and not block.nodes[k].reads)


def _uses(maker: int, allocation: int, readers: dict[int, list[int]], place: dict[int, int]) -> list[int]:
    """Return the places of the forward nodes that make and read an allocation."""
    return [place[k] for k in (maker, *readers[allocation]) if k in place]
