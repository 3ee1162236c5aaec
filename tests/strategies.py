"""Graphs to test with: Hypothesis strategies for small random blocks, and blocks of a realistic shape."""

from __future__ import annotations

from hypothesis import strategies as st

from stowage.stages.ir.block import BlockAllocation, BlockGraph, BlockNode

MIB = 1 << 20


class BlockBuilder:
    """Writes a block node by node; forward first, then `loss()`, then backward."""

    def __init__(self) -> None:
        self.nodes: list[BlockNode] = []
        self.allocations: list[BlockAllocation] = []
        self.output: tuple[int, ...] = ()
        self.incoming: tuple[int, ...] = ()
        self.forward_count = 0

    def add(
        self,
        name: str,
        time_s: float,
        reads: list[int],
        *sizes: int,
        workspace: int = 0,
        once: bool = False,
    ) -> list[int]:
        """A node that creates one allocation per size; returns their indices."""
        first = len(self.allocations)
        self.allocations.extend(BlockAllocation(f"{name}.{i}", size) for i, size in enumerate(sizes))
        made = list(range(first, len(self.allocations)))
        self.nodes.append(BlockNode(name, time_s, workspace, tuple(sorted(set(reads))), tuple(made), once))
        return made

    def loss(self, output: list[int]) -> list[int]:
        """End of forward: gradients of `output` arrive."""
        self.forward_count = len(self.nodes)
        first = len(self.allocations)
        self.allocations.extend(BlockAllocation(f"grad.{a}", self.allocations[a].nbytes) for a in output)
        self.output = tuple(output)
        self.incoming = tuple(range(first, len(self.allocations)))
        return list(self.incoming)

    def build(self, outgoing: list[int]) -> BlockGraph:
        """The finished block."""
        return BlockGraph(
            tuple(self.nodes),
            self.forward_count,
            tuple(self.allocations),
            self.output,
            self.incoming,
            tuple(outgoing),
        )


def attention_block() -> BlockGraph:
    """Self-attention with dropout: 16 forward nodes."""
    b, ms = BlockBuilder(), 1e-3
    ln, mean, rstd = b.add("layernorm", 2 * ms, [], 3 * MIB, 4096, 4096)
    (qkv,) = b.add("qkv", 12 * ms, [ln], 9 * MIB)
    (q,) = b.add("q", 1 * ms, [qkv], 3 * MIB)
    (k,) = b.add("k", 1 * ms, [qkv], 3 * MIB)
    (v,) = b.add("v", 1 * ms, [qkv], 3 * MIB)
    (scores,) = b.add("scores", 3 * ms, [q, k], 12 * MIB)
    (masked,) = b.add("mask", 3 * ms, [scores], 12 * MIB)
    (soft,) = b.add("softmax", 4 * ms, [masked], 12 * MIB)
    (drop,) = b.add("bernoulli", 12 * ms, [], 12 * MIB)
    (dropped,) = b.add("mul", 2 * ms, [soft, drop], 12 * MIB)
    (mixed,) = b.add("bmm", 3 * ms, [dropped, v], 3 * MIB)
    (clone,) = b.add("clone", 1 * ms, [mixed], 3 * MIB)
    (proj,) = b.add("proj", 4 * ms, [clone], 3 * MIB)
    (drop2,) = b.add("bernoulli2", 3 * ms, [], 3 * MIB)
    (scaled,) = b.add("mul2", 1 * ms, [proj, drop2], 3 * MIB)
    (out,) = b.add("add", 1 * ms, [scaled], 3 * MIB)
    (g,) = b.loss([out])
    (g1,) = b.add("mul2'", 1 * ms, [g, drop2], 3 * MIB)
    (w1,) = b.add("proj.w'", 4 * ms, [g1, clone], MIB)
    b.add("proj.update", ms, [w1], workspace=2 * MIB, once=True)
    (g2,) = b.add("proj.x'", 4 * ms, [g1], 3 * MIB)
    (g3,) = b.add("clone'", 1 * ms, [g2], 3 * MIB)
    (gd,) = b.add("bmm.p'", 3 * ms, [g3, v], 12 * MIB)
    (gv,) = b.add("bmm.v'", 3 * ms, [g3, dropped], 3 * MIB)
    (g4,) = b.add("mul'", 2 * ms, [gd, drop], 12 * MIB)
    (g5,) = b.add("softmax'", 5 * ms, [g4, soft], 12 * MIB)
    (g6,) = b.add("mask'", 3 * ms, [g5], 12 * MIB)
    (gq,) = b.add("scores.q'", 3 * ms, [g6, k], 3 * MIB)
    (gk,) = b.add("scores.k'", 3 * ms, [g6, q], 3 * MIB)
    (gqkv,) = b.add("cat", 2 * ms, [gq, gk, gv], 9 * MIB)
    (w2,) = b.add("qkv.w'", 12 * ms, [gqkv, ln], 3 * MIB)
    b.add("qkv.update", 2 * ms, [w2], workspace=6 * MIB, once=True)
    (gb,) = b.add("qkv.b'", 1 * ms, [gqkv], 4096)
    b.add("qkv.b.update", 1e-4, [gb], workspace=8192, once=True)
    (g7,) = b.add("qkv.x'", 12 * ms, [gqkv], 3 * MIB)
    (g8, gw, gb2) = b.add("layernorm'", 3 * ms, [g7, mean, rstd], 3 * MIB, 4096, 4096)
    b.add("ln.w.update", 1e-4, [gw], workspace=8192, once=True)
    b.add("ln.b.update", 1e-4, [gb2], workspace=8192, once=True)
    (g9,) = b.add("add'", 1 * ms, [g8, g], 3 * MIB)
    return b.build([g9])


def mlp_block() -> BlockGraph:
    """Feed-forward with a GELU spelled out in eight pointwise calls and dropout: 14 forward nodes."""
    b, ms = BlockBuilder(), 1e-3
    ln, mean, rstd = b.add("layernorm", 2 * ms, [], 3 * MIB, 4096, 4096)
    (h,) = b.add("fc", 16 * ms, [ln], 12 * MIB)
    (half,) = b.add("half", 2 * ms, [h], 12 * MIB)
    (cube,) = b.add("pow", 4 * ms, [h], 12 * MIB)
    (m1,) = b.add("mul.c", 2 * ms, [cube], 12 * MIB)
    (a1,) = b.add("add.h", 3 * ms, [h, m1], 12 * MIB)
    (m2,) = b.add("mul.k", 2 * ms, [a1], 12 * MIB)
    (tanh,) = b.add("tanh", 4 * ms, [m2], 12 * MIB)
    (p1,) = b.add("add.1", 2 * ms, [tanh], 12 * MIB)
    (act,) = b.add("mul.g", 3 * ms, [half, p1], 12 * MIB)
    (proj,) = b.add("proj", 16 * ms, [act], 3 * MIB)
    (drop,) = b.add("bernoulli", 3 * ms, [], 3 * MIB)
    (scaled,) = b.add("mul", 1 * ms, [proj, drop], 3 * MIB)
    (out,) = b.add("add", 1 * ms, [scaled], 3 * MIB)
    (g,) = b.loss([out])
    (g1,) = b.add("mul'", 1 * ms, [g, drop], 3 * MIB)
    (w1,) = b.add("proj.w'", 16 * ms, [g1, act], 3 * MIB)
    b.add("proj.update", 2 * ms, [w1], workspace=6 * MIB, once=True)
    (g2,) = b.add("proj.x'", 16 * ms, [g1], 12 * MIB)
    (gh,) = b.add("mul.g.a'", 3 * ms, [g2, p1], 12 * MIB)
    (gp,) = b.add("mul.g.b'", 3 * ms, [g2, half], 12 * MIB)
    (gt,) = b.add("tanh'", 4 * ms, [gp, tanh], 12 * MIB)
    (gm,) = b.add("mul.k'", 2 * ms, [gt], 12 * MIB)
    (gc,) = b.add("mul.c'", 2 * ms, [gm], 12 * MIB)
    (gpow,) = b.add("pow'", 5 * ms, [gc, h], 12 * MIB)
    (ghalf,) = b.add("half'", 2 * ms, [gh], 12 * MIB)
    (s1,) = b.add("sum1", 3 * ms, [gm, gpow], 12 * MIB)
    (s2,) = b.add("sum2", 3 * ms, [s1, ghalf], 12 * MIB)
    (w2,) = b.add("fc.w'", 16 * ms, [s2, ln], 3 * MIB)
    b.add("fc.update", 2 * ms, [w2], workspace=6 * MIB, once=True)
    (g7,) = b.add("fc.x'", 16 * ms, [s2], 3 * MIB)
    (g8, gw, gb2) = b.add("layernorm'", 3 * ms, [g7, mean, rstd], 3 * MIB, 4096, 4096)
    b.add("ln.w.update", 1e-4, [gw], workspace=8192, once=True)
    b.add("ln.b.update", 1e-4, [gb2], workspace=8192, once=True)
    (g9,) = b.add("add'", 1 * ms, [g8, g], 3 * MIB)
    return b.build([g9])


def deep_chain(layers: int) -> BlockGraph:
    """One block of `layers` × 5 forward nodes with residual connections: a model traced without a chain."""
    b, ms = BlockBuilder(), 1e-3
    (x,) = b.add("embed", ms, [], 3 * MIB)
    tape: list[tuple[int, int, int, int, int]] = []
    for i in range(layers):
        ln, stat = b.add(f"{i}.ln", ms, [x], 3 * MIB, 4096)
        (h,) = b.add(f"{i}.fc", 8 * ms, [ln], 12 * MIB)
        (a,) = b.add(f"{i}.act", 2 * ms, [h], 12 * MIB)
        (p,) = b.add(f"{i}.proj", 8 * ms, [a], 3 * MIB)
        (y,) = b.add(f"{i}.add", ms, [x, p], 3 * MIB)
        tape.append((x, ln, stat, h, a))
        x = y
    (g,) = b.loss([x])
    for i in range(layers - 1, -1, -1):
        xi, ln, stat, h, a = tape[i]
        (w,) = b.add(f"{i}.proj.w'", 8 * ms, [g, a], 3 * MIB)
        b.add(f"{i}.proj.update", ms, [w], workspace=MIB, once=True)
        (ga,) = b.add(f"{i}.proj.x'", 8 * ms, [g], 12 * MIB)
        (gh,) = b.add(f"{i}.act'", 2 * ms, [ga, h], 12 * MIB)
        (w2,) = b.add(f"{i}.fc.w'", 8 * ms, [gh, ln], 3 * MIB)
        b.add(f"{i}.fc.update", ms, [w2], workspace=MIB, once=True)
        (gl,) = b.add(f"{i}.fc.x'", 8 * ms, [gh], 3 * MIB)
        (gx,) = b.add(f"{i}.ln'", ms, [gl, xi, stat], 3 * MIB)
        (g,) = b.add(f"{i}.add'", ms, [gx, g], 3 * MIB)
    return b.build([g])


@st.composite
def small_blocks(draw: st.DrawFn, max_forward: int = 4, max_bytes: int = 6) -> BlockGraph:
    """Random blocks: a forward DAG with phantoms, mirrored by a backward; a few `once` nodes and workspaces."""
    b = BlockBuilder()
    size = st.integers(1, max_bytes)
    count = draw(st.integers(1, max_forward))
    outs: list[int] = []
    tape: list[tuple[int, list[int], list[int]]] = []
    for k in range(count):
        before = outs[-1:] if k else []
        if k > 1 and draw(st.booleans()):
            before = [*before, draw(st.sampled_from(outs[:-1]))]
        sizes = [draw(size)] + ([draw(size)] if draw(st.booleans()) else [])
        time_s = float(draw(st.integers(1, 5)))
        made = b.add(
            f"f{k}", time_s, before, *sizes, workspace=draw(st.integers(0, 2)), once=draw(st.integers(0, 9)) == 0
        )
        outs.append(made[0])
        tape.append((made[0], before, made[1:]))
    incoming = b.loss([outs[-1]])
    grads = {outs[-1]: incoming[0]}
    for k in range(count - 1, -1, -1):
        out, before, phantoms = tape[k]
        if out not in grads:
            continue
        reads = [grads[out], *phantoms]
        if draw(st.booleans()):
            reads.append(out)
        if before and draw(st.booleans()):
            reads.extend(before)
        targets = before or [-1]
        made = b.add(
            f"b{k}",
            float(draw(st.integers(1, 5))),
            reads,
            *(draw(size) for _ in targets),
            workspace=draw(st.integers(0, 2)),
        )
        for target, g in zip(targets, made):
            if target in grads:
                (g,) = b.add(f"s{k}", 1.0, [grads[target], g], draw(size))
            grads[target] = g
        if draw(st.integers(0, 4)) == 0:
            b.add(f"u{k}", 1.0, [made[0]], workspace=draw(st.integers(0, 2)), once=True)
    return b.build([grads[-1]])
