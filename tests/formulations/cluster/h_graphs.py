"""H-Graphs to test with: random small ones, budgets for them, and layered ones of a realistic shape."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from stowage.stages.formulations.cluster.policies import policy_schedules
from stowage.stages.ir.h_graph import HCluster, HGraph, HNode, HOption, HRun, HSchedule, HStep, HValue
from stowage.stages.simulate.h_graph import HCost, replay_h_graph


def checked_h(graph: HGraph, schedule: HSchedule, peak: int, save: int) -> HCost:
    """The referee's verdict, budgets included."""
    cost = replay_h_graph(graph, schedule)
    assert cost.peak_bytes <= peak
    assert cost.save_bytes <= save
    return cost


class HBuilder:
    """Writes an H-Graph: forward clusters or nodes, `loss`, then backward in reverse."""

    def __init__(self) -> None:
        self.nodes: list[HNode] = []
        self.values: list[HValue] = []
        self.clusters: list[HCluster] = []
        self.loss = 0

    def value(self, name: str, nbytes: int) -> int:
        """A value; returns its index."""
        self.values.append(HValue(name, nbytes))
        return len(self.values) - 1

    def node(
        self, name: str, reads: list[int], makes: list[int], plain: HRun | None = None, *, once: bool = False
    ) -> int:
        """A node; returns its index."""
        self.nodes.append(HNode(name, tuple(sorted(set(reads))), tuple(sorted(set(makes))), plain, once))
        return len(self.nodes) - 1

    def build(self, final: list[int]) -> HGraph:
        """The finished graph."""
        graph = HGraph(tuple(self.nodes), self.loss, tuple(self.values), tuple(self.clusters), tuple(final))
        graph.check()
        return graph


@st.composite
def small_h_graphs(draw: st.DrawFn, max_clusters: int = 3, max_bytes: int = 5) -> HGraph:
    """A chain of clusters with at most one skip, whose gradient then has two contributors; options with steps and reads
    of their own; a forward node without backward, and an update that runs once."""
    b, size = HBuilder(), st.integers(1, max_bytes)
    count = draw(st.integers(1, max_clusters))
    skip = draw(st.integers(0, count - 3)) if count >= 3 and draw(st.booleans()) else None
    outs: list[int] = []
    inputs: list[list[int]] = []
    for k in range(count):
        reads = outs[-1:]
        if skip is not None and k == count - 1:
            reads = [*reads, outs[skip]]
        inputs.append(reads)
        outs.append(b.value(f"x{k}", draw(size)))
        b.node(f"f{k}", reads, [outs[k]], draw(_plain(reads, outs[k])))
    extra = draw(st.booleans())
    if extra:
        aside = b.value("aside", draw(size))
        b.node("forward only", outs[-1:], [aside], HRun(1.0, (HStep(draw(st.integers(0, 2))),)))
    grads = [b.value(f"g{k}", b.values[outs[k]].nbytes) for k in range(count)]
    last = b.value("g", draw(size))
    b.loss = b.node("loss", outs[-1:] + ([aside] if extra else []), grads[-1:], HRun(0.0), once=True)
    for k in range(count - 1, -1, -1):
        makes = [grads[i] for i in range(count) if outs[i] in inputs[k]] or [last]
        always = [d for d in inputs[k] if draw(st.booleans())]
        backward = b.node(f"b{k}", [grads[k], *always], makes)
        own = [d for d in (*inputs[k], outs[k]) if d not in always]
        plain = b.nodes[k].plain
        assert plain is not None
        options = tuple(draw(_option(o, plain, own, grads[k], makes)) for o in range(draw(st.integers(1, 2))))
        b.clusters.append(HCluster(k, backward, options))
    if draw(st.booleans()):
        b.node("update", [last], [], HRun(1.0, (HStep(draw(st.integers(0, 2))),)), once=True)
    return b.build([last])


@st.composite
def _plain(draw: st.DrawFn, reads: list[int], out: int) -> HRun:
    """Fast-forward: one or two steps; the output may appear late and inputs may go early."""
    steps = [HStep(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        gone = tuple(sorted(d for d in reads if draw(st.booleans())))
        steps = [HStep(draw(st.integers(0, 2)), unborn=(out,)), HStep(draw(st.integers(0, 2)), released=gone)]
    return HRun(float(draw(st.integers(1, 3))), tuple(steps))


@st.composite
def _option(draw: st.DrawFn, number: int, plain: HRun, own: list[int], grad: int, makes: list[int]) -> HOption:
    """An option no lighter and no faster in forward than fast-forward."""
    phantom = draw(st.integers(0, 5))
    steps = [HStep(step.internal_bytes + draw(st.integers(0, 2)), step.unborn, step.released) for step in plain.steps]
    steps[-1] = HStep(steps[-1].internal_bytes + phantom, steps[-1].unborn, steps[-1].released)
    forward = HRun(plain.time_s + draw(st.integers(0, 1)), tuple(steps))
    backward_steps = [HStep(phantom + draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        freed = draw(st.integers(0, phantom))
        backward_steps = [
            HStep(phantom + draw(st.integers(0, 2)), unborn=tuple(sorted(makes))),
            HStep(phantom - freed + draw(st.integers(0, 2)), released=(grad,), phantom_released_bytes=freed),
        ]
    reads = tuple(sorted(d for d in own if draw(st.booleans())))
    backward = HRun(float(draw(st.integers(1, 4))), tuple(backward_steps), reads)
    return HOption(f"o{number}", phantom, forward, backward)


@st.composite
def h_graphs_and_budgets(draw: st.DrawFn, max_clusters: int = 3) -> tuple[HGraph, int, int]:
    """A small H-Graph, and budgets around what recomputing and keeping everything need."""
    graph = draw(small_h_graphs(max_clusters=max_clusters))
    costs = [replay_h_graph(graph, schedule) for schedule in policy_schedules(graph).values()]
    low, high = min(c.peak_bytes for c in costs) - 1, max(c.peak_bytes for c in costs)
    peak = draw(st.integers(max(1, low), high))
    saves = [c.save_bytes for c in costs]
    return graph, peak, draw(st.integers(min(saves), max(saves)))


def layered(count: int, options: int, *, skips: bool = True, seed: int = 0) -> HGraph:
    """`count` clusters in a row, like the layers of a network, with `options` schedules each: the more of its phantom
    an option gives up, the more its backward computes again, cheap operations first. With `skips` the first half feeds
    the second crosswise, as in a U-Net. Sizes and times vary by `seed`."""
    rng, b, mib = random.Random(seed), HBuilder(), 1 << 20
    outs = [b.value(f"x{k}", rng.randint(2, 6) * mib) for k in range(count)]
    inputs = [outs[k - 1 : k] if k else [] for k in range(count)]
    for k in range(count // 2 + 1, count) if skips else ():
        inputs[k] = [*inputs[k], outs[count - 1 - k]]
    grads = [b.value(f"g{k}", b.values[outs[k]].nbytes) for k in range(count)]
    shapes = [(rng.uniform(0.01, 0.05), rng.randint(10, 60) * mib, rng.uniform(0.1, 0.3)) for _ in range(count)]
    for k, (time_s, full, work) in enumerate(shapes):
        b.node(f"f{k}", inputs[k], [outs[k]], HRun(time_s, (HStep(int(full * work), unborn=(outs[k],)), HStep(0))))
    b.loss = b.node("loss", outs[-1:], grads[-1:], HRun(0.0), once=True)
    last = b.value("g", mib)
    for k in range(count - 1, -1, -1):
        makes = [grads[i] for i in range(count) if outs[i] in inputs[k]] or [last]
        backward = b.node(f"b{k}", [grads[k]], makes)
        b.clusters.append(HCluster(k, backward, _front(options, *shapes[k], inputs[k], outs[k], grads[k])))
    return b.build([last])


def _front(
    options: int, time_s: float, full: int, work: float, inputs: list[int], out: int, grad: int
) -> tuple[HOption, ...]:
    found = []
    for o in range(options):
        dropped = o / max(1, options - 1) * 0.95
        phantom, again = int(full * (1 - dropped)), time_s * dropped**2
        space = int(full * work)
        forward = HRun(time_s, (HStep(space + phantom // 2, unborn=(out,)), HStep(phantom)))
        steps = (
            HStep(phantom + int(space * (1 + dropped))),
            HStep(space, released=(grad,), phantom_released_bytes=phantom),
        )
        reads = tuple(sorted(inputs if dropped or o % 2 else [*inputs, out]))
        found.append(HOption(f"o{o}", phantom, forward, HRun(2 * time_s + again, steps, reads)))
    return tuple(found)
