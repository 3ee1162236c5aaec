"""Makes the blocks of the chain: assigns nodes, places updates, and describes each block as a `BlockGraph`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from stowage.stages.ir.block import BlockAllocation, BlockGraph, BlockNode
from stowage.stages.ir.exposure import exposed
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.trace import AGAIN, TraceTables
from stowage.stages.ir.updates import CLIP, UPDATE_ALL, left_behind
from stowage.stages.partition.chain import BlockChain, Like, find_chain


@dataclass
class _Members:
    forward: list[ComputeNode] = field(default_factory=list)
    backward: list[ComputeNode] = field(default_factory=list)


def gradient_accumulators(nodes: Sequence[ComputeNode], trace: TraceTables) -> frozenset[int]:
    """Return storages of partial parameter gradients: operands of the additions that end in a parameter's gradient.

    A parameter used twice (tied embeddings) gets its gradient in parts, which wait for each other outside the chain.
    """
    creator = {s: n for n in nodes for s in n.creates}
    readers: dict[int, int] = defaultdict(int)
    for node in nodes:
        for storage in node.reads:
            readers[storage] += 1
    final = {trace.values[g.gradient_value].storage for g in trace.gradients if g.gradient_value >= 0}
    found: set[int] = set(final)
    stack = [s for s in final if s in creator]
    while stack:
        node = creator[stack.pop()]
        additive = all(
            trace.calls[c].target in ("aten.add.Tensor", "aten.empty_strided.default", "aten.copy_.default")
            for c in node.calls
        )
        if not additive or node.phase != "backward":
            continue
        for storage in node.reads:
            if storage in creator and readers[storage] == 1 and creator[storage].phase == "backward":
                found.add(storage)
                stack.append(storage)
    return frozenset(found)


def partition(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    *,
    smallest_block: int = 4,
    long_lived_from: int | None = None,
    like: Like | None = None,
) -> tuple[list[ComputeNode], list[Block]]:
    """Assign every node to a block and describe each block; see `find_chain` for `long_lived_from` and `like`.

    Returns:
        The nodes, renumbered in the order of first execution without recomputation, and the blocks.
    """
    # The loss is made once and kept: made again at the end, it would be computed from the updated parameters.
    loss = trace.values[trace.meta.loss_value].storage
    nodes = [replace(n, once=True) if loss in n.creates else n for n in nodes]
    parameters = frozenset(s.storage for s in trace.storages if s.role in ("parameter", "state"))
    chain = find_chain(
        [n for n in nodes if n.phase != "update"],
        parameters,
        frozenset(s.storage for s in trace.storages if s.role == "input"),
        gradient_accumulators(nodes, trace),
        [s.nbytes for s in trace.storages],
        smallest_block=smallest_block,
        long_lived_from=long_lived_from,
        like=like,
    )
    nodes = [replace(n, once=True) if chain.long_lived.intersection(n.creates) else n for n in nodes]
    block_of = _assign(chain, nodes)
    updates = [n for n in nodes if n.phase == "update"]
    members = [_Members() for _ in range(len(chain.cuts) + 1)]
    for node in nodes:
        block = block_of.get(node.node, SHARED)
        if node.phase != "update" and block != SHARED:
            (members[block].forward if node.phase == "forward" else members[block].backward).append(node)
    after_the_chain = _place_updates(updates, members, trace)

    for group in members:
        group.backward = _run_once_beside_updates(group.backward, trace)
    ordered: list[ComputeNode] = [replace(n, block=SHARED) for n in chain.free if block_of[n.node] == SHARED]
    for block, group in enumerate(members):
        ordered += [replace(n, block=block) for n in group.forward]
    for block in range(len(members) - 1, -1, -1):
        ordered += [replace(n, block=block) for n in members[block].backward]
    ordered += [replace(n, block=SHARED) for n in after_the_chain]
    numbered = [replace(n, node=i) for i, n in enumerate(ordered)]
    return numbered, _describe(numbered, chain, trace)


def _assign(chain: BlockChain, nodes: Sequence[ComputeNode]) -> dict[int, int]:
    """Return the block of each node; parameter-free nodes go to the one block that reads them, else they are shared."""
    forward_borders = [c.forward_position for c in chain.cuts]
    backward_borders = [c.backward_position for c in reversed(chain.cuts)]
    last_block = len(chain.cuts)
    block_of = {n.node: bisect_left(forward_borders, e) for n, e in zip(chain.forward, chain.effective)}
    block_of |= {n.node: last_block - bisect_left(backward_borders, i) for i, n in enumerate(chain.backward)}
    readers: dict[int, set[int]] = defaultdict(set)
    for node in nodes:
        if node.node in block_of:
            for storage in node.reads:
                readers[storage].add(block_of[node.node])
    for node in reversed(chain.free):
        blocks = set().union(*(readers[s] for s in node.creates))
        block_of[node.node] = blocks.pop() if len(blocks) == 1 else SHARED
        for storage in node.reads:
            readers[storage].add(block_of[node.node])
    return block_of


def _place_updates(updates: list[ComputeNode], members: list[_Members], trace: TraceTables) -> list[ComputeNode]:
    """Put each update where its gradient is complete and nothing can need the old parameter any more.

    A recomputation later in the same block could read the parameter again. It can only serve backward nodes that read
    what descends from the parameter's readers, so the update follows the last of those; in a chain that is the node
    that completes the gradient, or a near neighbour. Additions to waiting gradients and norms of gradients follow what
    they read in the same way.

    Returns:
        The updates that wait for the last gradient (clipping and everything after it) or read only gradients that
        waited from the start; they run after the chain.
    """
    parameters = frozenset(s.storage for s in trace.storages if s.role == "parameter")
    waiting = frozenset(s.storage for s in trace.storages if s.role == "gradient")
    made_in: dict[int, int] = {}
    read_in: dict[int, int] = {}
    for block, group in enumerate(members):
        for node in group.backward:
            made_in.update(dict.fromkeys(node.creates, block))
        for node in [*group.forward, *group.backward]:
            for storage in node.reads:
                read_in[storage] = min(read_in.get(storage, block), block)
    placed: dict[int, list[tuple[int, ComputeNode]]] = defaultdict(list)
    after_the_chain: list[ComputeNode] = []
    position_of: dict[int, int] = {}
    for update in updates:
        needed = [s for s in update.reads if s in made_in]
        late = any(trace.calls[c].target in (CLIP, UPDATE_ALL) for c in update.calls) or any(
            made_in[s] == SHARED for s in needed
        )
        if late or not needed:
            after_the_chain.append(update)
            made_in.update(dict.fromkeys({*update.creates, *waiting.intersection(update.mutates)}, SHARED))
            continue
        derived = set(parameters.intersection(update.mutates))
        block = min([made_in[s] for s in needed] + [read_in[s] for s in derived if s in read_in])
        group = members[block]
        for node in group.forward:
            if derived.intersection(node.reads):
                derived.update(node.creates)
        needs = [position_of[s] for s in needed if made_in[s] == block and s in position_of]
        for i, node in enumerate(group.backward):
            if derived.intersection(node.reads) or set(needed).intersection(node.creates):
                needs.append(i)
        position = max(needs, default=len(group.backward) - 1)
        placed[block].append((position, update))
        for storage in {*update.creates, *waiting.intersection(update.mutates)}:
            made_in[storage], position_of[storage] = block, position
    for block, pairs in placed.items():
        after: dict[int, list[ComputeNode]] = defaultdict(list)
        for position, update in pairs:
            after[position].append(update)
        members[block].backward = [
            *after[-1],
            *(n for i, node in enumerate(members[block].backward) for n in (node, *after[i])),
        ]
    return after_the_chain


def _run_once_beside_updates(backward: list[ComputeNode], trace: TraceTables) -> list[ComputeNode]:
    """Let backward nodes of a block that updates parameters run once: again, they would find the new parameters.

    What backward makes of codes may be made again, if no parameter is read for it.
    """
    updated = {s for n in backward if n.phase == "update" for s in n.mutates}
    if all(n.phase != "update" for n in backward):
        return backward

    def again(node: ComputeNode) -> bool:
        made = [trace.storages[s].name for s in node.creates]
        return any(name.endswith(AGAIN) for name in made) and updated.isdisjoint(node.reads)

    return [n if again(n) else replace(n, once=True) for n in backward]


def _describe(nodes: list[ComputeNode], chain: BlockChain, trace: TraceTables) -> list[Block]:
    """Describe each block of the chain."""
    count = len(chain.cuts) + 1
    final = {trace.values[v].storage for v in left_behind(trace)}
    crossing = {s for cut in chain.cuts for s in cut.gradients}
    made_in = {s: n.block for n in nodes for s in n.creates if n.phase != "forward"}
    last_read = {s: n.block for n in nodes if n.phase != "forward" for s in n.reads}
    staying: dict[int, tuple[int, int]] = {}
    for storage, block in made_in.items():
        end = SHARED if storage in final else last_read.get(storage, block)
        if end < block and storage not in crossing and block != SHARED:
            staying[storage] = (block, end)

    members: dict[int, list[ComputeNode]] = defaultdict(list)
    for node in exposed(nodes):
        members[node.block].append(node)
    made_by: dict[int, set[int]] = defaultdict(set)
    consumed: dict[int, list[int]] = defaultdict(list)
    # Bytes in memory during the backward of blocks from `made` − 1 down to `end`, as differences.
    change = [0] * (count + 1)
    for storage, (made, end) in staying.items():
        made_by[made].add(storage)
        consumed[end].append(storage)
        if made > max(end, 0):
            change[made - 1] += trace.storages[storage].nbytes
            if end > 0:
                change[end - 1] -= trace.storages[storage].nbytes
    resident = list(accumulate(reversed(change[:count])))[::-1]

    blocks: list[Block] = []
    for block in range(count):
        inside = members[block]
        created = {s for n in inside for s in n.creates}
        incoming = chain.cuts[block].gradients if block < count - 1 else ()
        outgoing = set(chain.cuts[block - 1].gradients if block else ())
        outgoing |= made_by[block] | ((final & created) - chain.long_lived)
        output = (chain.cuts[block].storage,) if block < count - 1 else ()
        graph, numbers, storages = _graph(inside, output, incoming, outgoing, chain.long_lived, trace)
        blocks.append(
            Block(
                block=block,
                block_hash=graph.content_hash(),
                graph=graph.to_json(),
                nodes=numbers,
                storages=storages,
                label=_label(inside, trace),
                resident_bytes=resident[block],
                consumed=tuple(sorted(consumed[block])),
            )
        )
    return blocks


def _graph(
    inside: list[ComputeNode],
    output: tuple[int, ...],
    incoming: tuple[int, ...],
    outgoing: set[int],
    long_lived: frozenset[int],
    trace: TraceTables,
) -> tuple[BlockGraph, tuple[int, ...], tuple[int, ...]]:
    """Relabel a block's nodes and storages by position; long-lived values are resident outside."""
    storages = [s for n in inside for s in n.creates if s not in long_lived]
    storages += [s for s in sorted(incoming) if s not in storages]
    index = {s: i for i, s in enumerate(storages)}
    graph = BlockGraph(
        nodes=tuple(
            BlockNode(
                name=n.name,
                time_s=n.time_s,
                workspace_bytes=n.workspace_bytes,
                reads=tuple(sorted(index[s] for s in n.reads if s in index)),
                creates=tuple(sorted(index[s] for s in n.creates if s in index)),
                once=n.once,
            )
            for n in inside
        ),
        forward_count=sum(n.phase == "forward" for n in inside),
        allocations=tuple(BlockAllocation(trace.storages[s].name, trace.storages[s].nbytes) for s in storages),
        output=tuple(index[s] for s in output),
        incoming=tuple(sorted(index[s] for s in incoming)),
        outgoing=tuple(sorted(index[s] for s in outgoing)),
    )
    return graph, tuple(n.node for n in inside), tuple(storages)


def _label(inside: list[ComputeNode], trace: TraceTables) -> str:
    """Return the first and last module path of the block's forward."""
    modules = [trace.calls[c].module for n in inside if n.phase == "forward" for c in n.calls]
    named = [m for m in modules if m]
    if not named:
        return trace.meta.model
    return named[0] if named[0] == named[-1] else f"{named[0]} … {named[-1]}"
