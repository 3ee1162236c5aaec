"""Makes forward graphs of any size, without a model, that H-Partition is timed on; bytes are plausible."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from stowage.stages.ir.hierarchy import FlowGraph, FlowNode

HIDDEN = 8 << 20
"""Bytes of a hidden state."""

TOKENS = 256
"""Number of steps of a scan."""


class _Builder:
    """Adds nodes that make one value each; node and value have the same number."""

    def __init__(self) -> None:
        self.nodes: list[FlowNode] = []
        self.value_bytes: list[int] = []

    def add(self, key: str, reads: Sequence[int], nbytes: int, *, enters: bool = False) -> int:
        number = len(self.nodes)
        self.nodes.append(FlowNode(tuple(dict.fromkeys(reads)), (number,), f"{key}.{nbytes}", (), enters))
        self.value_bytes.append(nbytes)
        return number

    def chain(self, keys: str, x: int, nbytes: int = HIDDEN) -> int:
        for key in keys.split():
            x = self.add(key, [x], nbytes)
        return x

    def finish(self, last: int) -> FlowGraph:
        return FlowGraph(self.nodes, self.value_bytes, (self.add("loss", [last], 4),))


def _attention(build: _Builder, x: int, memory: int | None = None) -> int:
    """Add pre-norm attention with a drawn mask, over itself or a memory, and its residual."""
    normed = build.add("norm", [x], HIDDEN)
    of = normed if memory is None else memory
    q, k, v = build.add("q", [normed], HIDDEN), build.add("k", [of], HIDDEN), build.add("v", [of], HIDDEN)
    weights = build.chain("scale softmax", build.add("scores", [q, k], 2 * HIDDEN), 2 * HIDDEN)
    mask = build.add("draw", [], HIDDEN // 2)
    mixed = build.add("mix", [build.add("dropout", [weights, mask], 2 * HIDDEN), v], HIDDEN)
    return build.add("add", [build.chain("project", mixed), x], HIDDEN)


def _feed_forward(build: _Builder, x: int) -> int:
    wide = build.chain("up gelu", build.add("norm", [x], HIDDEN), 4 * HIDDEN)
    return build.add("add", [build.chain("down", wide), x], HIDDEN)


def transformer(size: int) -> FlowGraph:
    """Make equal layers of attention and feed-forward."""
    build = _Builder()
    x = build.add("embed", [], HIDDEN, enters=True)
    while len(build.nodes) < size - 20:
        x = _feed_forward(build, _attention(build, x))
    return build.finish(x)


def encoder_decoder(size: int) -> FlowGraph:
    """Make layers of which the second half reads the last result of the first half."""
    build = _Builder()
    x = build.add("embed", [], HIDDEN, enters=True)
    while len(build.nodes) < size // 2:
        x = _feed_forward(build, _attention(build, x))
    y = build.add("embed", [], HIDDEN, enters=True)
    while len(build.nodes) < size - 35:
        y = _feed_forward(build, _attention(build, _attention(build, y), x))
    return build.finish(y)


def unet(size: int) -> FlowGraph:
    """Make as many nested skips as a tenth of the nodes: each stage's result is read again on the way up."""
    build = _Builder()
    x = build.add("stem", [], HIDDEN, enters=True)
    skips: list[int] = []
    for _ in range(size // 11):
        x = build.chain("conv norm relu conv", x)
        skips.append(x)
        x = build.add("pool", [x], HIDDEN // 4)
    for skip in reversed(skips):
        x = build.add("up", [x], HIDDEN)
        x = build.chain("conv norm relu", build.add("concat", [x, skip], 2 * HIDDEN))
    return build.finish(x)


def scan(size: int) -> FlowGraph:
    """Make layers of a state-space model: a step for each of `TOKENS` tokens, and one node that reads all of them."""
    build = _Builder()
    x = build.add("embed", [], HIDDEN, enters=True)
    while len(build.nodes) < size - 3 * TOKENS:
        gate, wide = build.add("gate", [x], HIDDEN), build.chain("project conv silu", x)
        state = build.add("zeros", [], HIDDEN // TOKENS)
        outputs: list[int] = []
        for _ in range(TOKENS):
            token = build.add("token", [wide], HIDDEN // TOKENS)
            state = build.add("step", [state, token], HIDDEN // TOKENS)
            outputs.append(build.add("output", [state, token], HIDDEN // TOKENS))
        mixed = build.add("gated", [build.add("stack", outputs, HIDDEN), gate], HIDDEN)
        x = build.add("add", [build.chain("project", mixed), x], HIDDEN)
    return build.finish(build.chain("norm relu " * max((size - len(build.nodes)) // 2, 0), x))


def skips(size: int, *, seed: int = 0, share: float = 0.2, longest: int = 0) -> FlowGraph:
    """Make a random graph: each node reads the one before or one close by, and some read any other as well.

    Args:
        size: number of nodes.
        seed: seed of everything random.
        share: share of nodes that read another one.
        longest: how far back that may be; anywhere by default.
    """
    draw = random.Random(seed)
    build = _Builder()
    for i in range(size - 1):
        reads = [i - 1 if draw.random() < 0.8 else draw.randrange(max(i - 5, 0), i)] if i else []
        if i and draw.random() < share:
            reads.append(draw.randrange(max(i - longest, 0) if longest else 0, i))
        build.add(f"op{draw.randrange(3)}", reads, draw.randrange(1, 9) << 20, enters=not reads)
    return build.finish(size - 2)


SHAPES: dict[str, Callable[[int], FlowGraph]] = {
    "transformer": transformer,
    "encoder-decoder": encoder_decoder,
    "unet": unet,
    "scan": scan,
    "skips": skips,
}
"""Name -> function that makes a graph of about as many nodes as asked for."""
