"""TW-Remat: rematerialization along a tree decomposition, for graphs of any shape and size.

Kumar, Purohit, Svitkina, Vee, Wang: "Efficient Rematerialization for Deep Networks", NeurIPS 2019.

| symbol | here | meaning | unit |
|---|---|---|---|
| G | `NodeGraph` | the nodes of a block, the loss among them, and who reads whom | |
| T, k | `NodeGraph.tree`, `width` | tree decomposition of the moral graph of G, and its width | nodes |
| S | `separator` | the nodes of the bag without which the nodes to run fall into small parts | |
| D_i | `parts` | those parts | |
| W | `straight_bytes` | nodes whose plain execution takes no more are executed plainly | bytes |

The nodes of S run in topological order. Before each of them recursion makes what it reads, in every part that has some
of it; then all of that part is dropped. At last recursion runs what is left in each part. In memory are the separators
of all levels, of which there are O(log n), so O(k log n) results; a part is made anew for many nodes of S.

Where this differs from the paper, and why:

- What is made in a part for one node of S, and read by a later node of S too, stays until then. The paper makes the
  part anew each time, so times multiply from level to level; here a level costs about one more forward.
- A part makes only what the targets need, and what has not run yet and comes before the node of S that asks.
- `once` nodes and backward nodes run once, and their results stay while they are needed: in a block with updates,
  backward nodes would find the new parameters. First runs ascend, as in all formulations of a block: before a node
  runs for the first time, all lower nodes that have not run do so.
- S is not the most balanced bag but the lightest of those that leave no part with more than two thirds of the nodes.
- Bytes and liveness say what is in memory, not the recursion: a result is freed after the last use of that copy, and
  executions that nobody uses are dropped.
- W stops the recursion, and `kept` names forward nodes that run once (the most expensive per byte): with either large,
  everything is kept. The smallest schedules are then relieved at their peaks (`relief.py`), and all are tried within
  larger peaks, with executions left out (`any_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stowage.stages.formulations.block.greedy.lazy import Candidate
from stowage.stages.formulations.block.greedy.selective import undominated
from stowage.stages.formulations.block.staged_order import StagedGraph, schedule_of
from stowage.stages.formulations.block.tw_remat.any_order import candidate_of_order, order_of, retain, useful
from stowage.stages.formulations.block.tw_remat.order import NodeGraph, TooLongError, TreewidthOrder
from stowage.stages.formulations.block.tw_remat.relief import relieved
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport

# W shrinks from plain PyTorch's peak by this factor from schedule to schedule.
_STEP = 0.75
_KEPT_SHARES = (0.0, 0.1, 0.25, 0.5)
# Above this many nodes fewer starts are tried.
_SMALL = 500
# Most executions per node, on average; longer schedules are of no use.
_LONGEST = 12
# Schedules that `retain` starts from at each peak.
_TRIES = 3
# Steps of relief for a block of one node; larger ones have fewer.
_ROUNDS = 40_000


def tw_remat(block: BlockGraph, levels: int = 24) -> list[tuple[BlockSchedule, SolveReport]]:
    """Find schedules from plain PyTorch down to the least memory, slower as they get smaller, none dominated.

    Args:
        block: graph to schedule; `ir.block` says what is counted.
        levels: number of values of W that are tried.

    Returns:
        Schedule and report of each; equal inputs give equal schedules.
    """
    graph = StagedGraph.of(block)
    bound_s = sum(node.time_s for node in graph.nodes)
    return [
        (schedule_of(graph, c.line), SolveReport("tw_remat", "heuristic", c.cost.time_s, bound_s))
        for c in tw_candidates(graph, levels)
    ]


def tw_candidates(graph: StagedGraph, levels: int = 24) -> list[Candidate]:
    """Find what `tw_remat` finds, as candidates with costs."""
    plain = candidate_of_order(graph, range(len(graph.nodes)))
    found = undominated([plain, *_by_straight_bytes(graph, plain, levels)])
    found += _smaller(graph, found)
    found = undominated(found)
    smallest = min(c.cost.peak_bytes for c in found)
    steps = levels if len(graph.nodes) <= _SMALL else max(1, levels // 2)
    for step in range(steps + 1):
        limit = plain.cost.peak_bytes - (plain.cost.peak_bytes - smallest) * step // steps
        fitting = [c for c in found if c.cost.peak_bytes <= limit]
        for start in _starts(fitting):
            order = retain(graph, order_of(start), limit, plain.cost.save_bytes)
            found.append(candidate_of_order(graph, order))
    return undominated(found)


def _smaller(graph: StagedGraph, found: Sequence[Candidate]) -> list[Candidate]:
    """Relieve the smallest candidates at their peaks."""
    nodes, loss = graph.nodes, graph.loss
    rounds = max(8, _ROUNDS // len(nodes))
    starts = sorted(found, key=lambda c: (c.cost.peak_bytes, c.cost.time_s))[: _TRIES if len(nodes) <= _SMALL else 1]
    return [c for start in starts for c in relieved(graph, start, lambda k: k < loss and not nodes[k].once, rounds)]


def _by_straight_bytes(graph: StagedGraph, plain: Candidate, levels: int) -> Iterator[Candidate]:
    """Run the recursion with ever smaller W."""
    nodes = NodeGraph.of(graph)
    for kept in _kept_sets(graph):
        straight = float(plain.cost.peak_bytes)
        previous: list[int] = []
        for _ in range(levels):
            straight *= _STEP
            try:
                order = TreewidthOrder(nodes, int(straight), kept, _LONGEST * len(graph.nodes)).everything()
            except TooLongError:
                break
            if order != previous:
                yield candidate_of_order(graph, useful(graph, order))
                previous = order


def _kept_sets(graph: StagedGraph) -> Iterator[frozenset[int]]:
    """Yield growing sets of the forward nodes that are most expensive per byte."""
    price = {
        k: node.time_s / max(1, sum(graph.nbytes[a] for a in node.creates))
        for k, node in enumerate(graph.nodes[: graph.loss])
    }
    order = sorted(price, key=lambda k: (-price[k], k))
    for share in _KEPT_SHARES if len(graph.nodes) <= _SMALL else _KEPT_SHARES[::2]:
        yield frozenset(order[: int(len(order) * share)])


def _starts(fitting: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest, the smallest, and some between."""
    last = len(fitting) - 1
    return [fitting[i] for i in sorted({last * n // (_TRIES - 1) for n in range(_TRIES)})]
