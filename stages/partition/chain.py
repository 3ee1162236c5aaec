"""Finds the block sequence of Rockmate (thesis 2.3): each block depends only on the one before.

Cuts are found in the graph alone. Values that depend on no parameter (masks, positions, rotary tables) are set aside
first: they cross every layer and would hide every cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stowage.stages.ir.graph import ComputeNode

MOST_WAITING = 1024
"""Most gradients that may cross a border beside that of `x`, where long-lived values are kept."""


@dataclass(frozen=True)
class Cut:
    """A border between two blocks.

    Attributes:
        forward_position: the border lies after this position among the chain's forward nodes.
        backward_position: the border lies after this position among the backward nodes.
        storage: the storage that crosses in forward (`x`).
        gradients: the gradients that cross in backward: that of `x`, or none.
    """

    forward_position: int
    backward_position: int
    storage: int
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class Like:
    """Another cutting of the same step that a chain is to be cut like.

    Attributes:
        borders: storages that may cross borders in forward.
        long_lived: storages of long-lived values.
    """

    borders: frozenset[int]
    long_lived: frozenset[int]


@dataclass(frozen=True)
class BlockChain:
    """The block sequence.

    Attributes:
        cuts: borders, from the first block to the last.
        long_lived: storages of forward values that cross borders beside `x`: made once, in memory until their last use.
        forward: nodes on the chain, in order; `effective` is the position at which each one counts: nodes that read
            only parameters count at their first reader.
        backward: backward nodes on the chain, without updates.
        free: nodes that depend on no parameter.
    """

    cuts: list[Cut]
    forward: list[ComputeNode]
    effective: list[int]
    backward: list[ComputeNode]
    free: list[ComputeNode]
    long_lived: frozenset[int] = frozenset()


def parameter_free(nodes: Sequence[ComputeNode], parameters: frozenset[int], accumulators: frozenset[int]) -> set[int]:
    """Return nodes whose results depend on no parameter and on no random number, and that change nothing.

    The node that makes a parameter's gradient is never one of them, not even if the gradient is constant (`y.sum()`).
    """
    dependent: set[int] = set()
    free: set[int] = set()
    for node in nodes:
        depends = any(s in parameters or s in dependent for s in node.reads) or node.random or node.mutates or node.once
        depends = depends or bool(accumulators.intersection(node.creates))
        if depends:
            dependent.update(node.creates)
        else:
            free.add(node.node)
    return free


def find_chain(
    nodes: Sequence[ComputeNode],
    parameters: frozenset[int],
    inputs: frozenset[int],
    accumulators: frozenset[int],
    storage_bytes: Sequence[int],
    *,
    smallest_block: int,
    long_lived_from: int | None = None,
    like: Like | None = None,
) -> BlockChain:
    """Cut the step into blocks.

    Args:
        nodes: compute nodes in topological order.
        parameters: storages of parameters.
        inputs: storages of the batch.
        accumulators: storages of partial parameter gradients; they may cross borders.
        storage_bytes: bytes of each storage.
        smallest_block: neighbours with fewer forward nodes than this together are merged.
        long_lived_from: values read at least so many nodes after they are made are long-lived: kept instead of hiding
            borders (what a decoder reads of its encoder, skips of a U-Net, inputs of a scan); their gradients may then
            wait beside that of `x`. None for no long-lived values.
        like: cut here and nowhere else, and keep these long-lived values, whatever the sizes of blocks.
    """
    free = parameter_free(nodes, parameters, accumulators)
    forward = [n for n in nodes if n.phase == "forward" and n.node not in free]
    backward = [n for n in nodes if n.phase == "backward" and n.node not in free]
    on_chain = {s for n in forward for s in n.creates}
    effective = _effective_positions(forward, on_chain, _derived([n for n in nodes if n.phase == "forward"], inputs))
    made_at = {s: position for n, position in zip(forward, effective) for s in n.creates}
    last_read: dict[int, int] = {}
    for node, position in zip(forward, effective):
        for storage in node.reads:
            if storage in made_at:
                last_read[storage] = max(last_read.get(storage, -1), position)
    long_lived = frozenset[int]()
    if like is not None:
        long_lived = like.long_lived
    elif long_lived_from is not None:
        long_lived = _long_lived(forward, made_at, last_read, long_lived_from)
    if long_lived:
        made_at = {s: position for s, position in made_at.items() if s not in long_lived}
        last_read = {s: position for s, position in last_read.items() if s not in long_lived}
    crossing = _crossing(len(forward), made_at, last_read)

    seen: set[int] = set()
    borders: list[tuple[int, int]] = []
    for position in range(len(forward) - 1):
        if len(crossing[position]) == 1:
            (storage,) = crossing[position]
            if storage not in seen and (like is None or storage in like.borders):
                seen.add(storage)
                borders.append((position, storage))
    if any(n.phase == "backward" for n in nodes):
        cuts = _match_backward(
            borders,
            _spans(forward, effective, parameters, made_at),
            backward,
            accumulators,
            storage_bytes,
            several=bool(long_lived),
        )
    else:  # a forward alone
        cuts = [Cut(position, -1, storage, ()) for position, storage in borders]
    return BlockChain(
        cuts=_merge_small(cuts, effective, smallest_block) if like is None else cuts,
        forward=forward,
        effective=effective,
        backward=backward,
        free=[n for n in nodes if n.node in free],
        long_lived=long_lived,
    )


def _long_lived(
    forward: Sequence[ComputeNode], made_at: dict[int, int], last_read: dict[int, int], long_lived_from: int
) -> frozenset[int]:
    """Return values that live long, with everything else that their makers make: these run once."""
    long = {s for s, last in last_read.items() if last - made_at[s] >= long_lived_from}
    return frozenset(s for n in forward if long.intersection(n.creates) for s in n.creates)


def _derived(nodes: Sequence[ComputeNode], inputs: frozenset[int]) -> set[int]:
    """Return the storages of the batch, and of all that is made from them."""
    found = set(inputs)
    for node in nodes:
        if found.intersection(node.reads):
            found.update(node.creates)
    return found


def _effective_positions(forward: Sequence[ComputeNode], on_chain: set[int], of_batch: set[int]) -> list[int]:
    """Return each node's effective position; nodes that read nothing of the batch count where they are first read.

    Such nodes are casts of weights. Random nodes stay where they are: their order decides the numbers they draw.
    """
    creator = {s: i for i, n in enumerate(forward) for s in n.creates}
    source: list[bool] = []
    for node in forward:
        made = [creator[s] for s in node.reads if s in on_chain]
        apart = not node.random and not node.mutates and not of_batch.intersection(node.reads)
        source.append(apart and all(source[i] for i in made))
    effective = list(range(len(forward)))
    first_reader: dict[int, int] = {}
    for i in range(len(forward) - 1, -1, -1):
        if source[i]:
            readers = [first_reader[s] for s in forward[i].creates if s in first_reader]
            if readers:
                effective[i] = min(readers)
        for storage in forward[i].reads:
            if storage in creator:
                first_reader[storage] = min(first_reader.get(storage, effective[i]), effective[i])
    return effective


def _crossing(count: int, made_at: dict[int, int], last_read: dict[int, int], most: int = 1) -> list[set[int]]:
    """Return, for each position, the storages made by then and read later; {-1, -2} for more than `most`."""
    starts: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for storage, last in last_read.items():
        if last > made_at[storage]:
            starts[made_at[storage]].append(storage)
            ends[last].append(storage)
    alive: set[int] = set()
    found: list[set[int]] = []
    for position in range(count):
        alive.difference_update(ends[position])
        alive.update(s for s in starts[position])
        found.append(set(alive) if len(alive) <= most else {-1, -2})
    return found


def _spans(
    forward: Sequence[ComputeNode], effective: Sequence[int], parameters: frozenset[int], made_at: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """Return the first and last forward position of each storage: where it is made, or where a parameter is read."""
    spans = {s: (position, position) for s, position in made_at.items()}
    for node, position in zip(forward, effective):
        for storage in parameters.intersection(node.reads):
            low, high = spans.get(storage, (position, position))
            spans[storage] = (min(low, position), max(high, position))
    return spans


def _match_backward(
    borders: list[tuple[int, int]],
    spans: dict[int, tuple[int, int]],
    backward: Sequence[ComputeNode],
    accumulators: frozenset[int],
    storage_bytes: Sequence[int],
    *,
    several: bool = False,
) -> list[Cut]:
    """Give every forward border its place in the backward pass, or drop the border.

    At a border with interface x: what belongs after it is not read later in backward, what belongs before it (x
    excepted) is not read earlier, and at most one gradient crosses; of several such places, one at which the gradient
    is as large as x is taken. With `several`, more gradients may cross: a place with the fewest bytes of them is taken,
    and the gradient of x's size with the earliest last use is the border's.
    """
    made = {s: i for i, n in enumerate(backward) for s in n.creates if s not in accumulators}
    last: dict[int, int] = {}
    for i, node in enumerate(backward):
        for storage in node.reads:
            if storage in made:
                last[storage] = i
    crossing = _crossing(len(backward), made, last, MOST_WAITING if several else 1)
    last_read, first_read = _reads_by_position(backward, spans)
    matched: list[Cut] = []
    previous = -1
    for position, storage in reversed(borders):
        low = max(previous, last_read(position), 0)
        high = first_read(position, storage)
        places = [p for p in range(low, high) if -1 not in crossing[p]]
        alike = [p for p in places if any(storage_bytes[g] == storage_bytes[storage] for g in crossing[p])]
        if places:
            place = (alike or places)[0]
            gradients = sorted(crossing[place])
            if several and (len(gradients) != 1 or made[gradients[0]] <= previous):  # it may skip the next block
                place = min(alike or places, key=lambda p: (sum(storage_bytes[g] for g in crossing[p]), p))
                same = [g for g in crossing[place] if storage_bytes[g] == storage_bytes[storage] and made[g] > previous]
                gradients = [min(same, key=lambda g: (last[g], g))] if same else []
            matched.append(Cut(position, place, storage, tuple(gradients)))
            previous = place
    found = matched[::-1]
    if not several:
        return found
    # A gradient that waits for more than the next block does not belong to the border.
    ends = [len(backward), *(cut.backward_position for cut in found)]
    return [replace(c, gradients=tuple(g for g in c.gradients if last[g] <= end)) for c, end in zip(found, ends)]


def _reads_by_position(
    backward: Sequence[ComputeNode], spans: dict[int, tuple[int, int]]
) -> tuple[Callable[[int], int], Callable[[int, int], int]]:
    """Make two look-ups for a border after a forward position.

    One returns the last backward position that reads what belongs wholly after the border; the other the first that
    reads what belongs wholly before it, leaving out one storage.
    """
    later = sorted((spans[s][0], i) for i, n in enumerate(backward) for s in n.reads if s in spans)
    latest: list[int] = []
    for _, i in reversed(later):
        latest.append(max(i, latest[-1] if latest else -1))
    latest.reverse()
    starts = [start for start, _ in later]
    earlier = sorted((spans[s][1], i, s) for i, n in enumerate(backward) for s in n.reads if s in spans)
    first: list[tuple[tuple[int, int], tuple[int, int]]] = []
    none = (len(backward), -1)
    best, second = none, none
    for _, i, s in earlier:
        if i < best[0]:
            best, second = (i, s), (best if best[1] != s else second)
        elif s != best[1] and i < second[0]:
            second = (i, s)
        first.append((best, second))
    ends = [end for end, _, _ in earlier]

    def last_read(position: int) -> int:
        at = bisect_right(starts, position)
        return latest[at] if at < len(latest) else -1

    def first_read(position: int, but: int) -> int:
        at = bisect_right(ends, position) - 1
        if at < 0:
            return len(backward)
        one, two = first[at]
        return two[0] if one[1] == but else one[0]

    return last_read, first_read


def _merge_small(cuts: list[Cut], effective: list[int], smallest: int) -> list[Cut]:
    """Drop borders so that every block has at least `smallest` forward nodes, as far as its neighbours allow."""
    positions = sorted(effective)
    kept: list[Cut] = []
    before = 0
    for cut in cuts:
        until = bisect_right(positions, cut.forward_position)
        if until - before >= smallest:
            kept.append(cut)
            before = until
    while kept and len(positions) - bisect_right(positions, kept[-1].forward_position) < smallest:
        kept.pop()
    return kept
