"""Tiny steps of which some nodes may be computed in another way: together in one graph, and each choice by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hypothesis import strategies as st

from stowage.stages.formulations.cuts.step_graph import Charge, StepGraph
from stowage.stages.ir.graph import ComputeNode
from tests.formulations.cuts.tiny_steps import TIME_S, tiny_steps


@dataclass(frozen=True)
class Site:
    """A node that may be replaced by others, or that may read something else, which others make."""

    node: int
    others: tuple[int, ...]
    instead: tuple[int, int] | None = None


@dataclass(frozen=True)
class TinyWays:
    """The graph of all ways together, and the sites at which they differ."""

    union: StepGraph
    sites: tuple[Site, ...]

    def each(self) -> Iterator[StepGraph]:
        """The graph of each choice that its charges allow; the first is the step as it was."""
        for chosen in product((False, True), repeat=len(self.sites)):
            others = {n for site, other in zip(self.sites, chosen) if other for n in site.others}
            if sum(c.share for c in self.union.charges if not c.nodes.isdisjoint(others)) > 1:
                continue
            left_out: set[int] = set()
            read: dict[int, dict[int, int]] = {}
            for site, other in zip(self.sites, chosen):
                if not other:
                    left_out.update(site.others)
                elif site.instead is None:
                    left_out.add(site.node)
                else:
                    read[site.node] = dict([site.instead])
            kept = [
                replace(n, reads=tuple(read.get(n.node, {}).get(s, s) for s in n.reads))
                for n in self.union.nodes
                if n.node not in left_out
            ]
            number = {n.node: i for i, n in enumerate(kept)}
            yield replace(
                self.union,
                nodes=[replace(n, node=number[n.node]) for n in kept],
                once=frozenset(number[n] for n in self.union.once if n in number),
                optional=frozenset(),
                families=(),
                instead={},
                charges=(),
                draws=None,
                least_s=None,
            )


@st.composite
def tiny_ways(draw: st.DrawFn) -> TinyWays:
    """One or two sites: what makes a value makes codes first, or what reads one reads what is made of its codes."""
    step = draw(tiny_steps(max_nodes=6))
    nbytes = list(step.nbytes)
    may = [n.node for n in step.nodes if len(n.creates) == 1 and not n.mutates and not n.once and not n.takes]
    chosen = draw(st.lists(st.sampled_from(may), min_size=1, max_size=2, unique=True)) if may else []
    nodes: list[ComputeNode] = []
    sites: list[Site] = []
    once: set[int] = set()

    def added(node: ComputeNode) -> int:
        nodes.append(replace(node, node=len(nodes)))
        return len(nodes) - 1

    def value() -> int:
        nbytes.append(draw(st.integers(1, 4)))
        return len(nbytes) - 1

    for node in step.nodes:
        own = replace(node, time_s=node.time_s + 2 * TIME_S) if node.node in chosen else node
        number = added(own)
        if node.node in step.once:
            once.add(number)
        if node.node not in chosen:
            continue
        like = replace(own, time_s=draw(st.integers(1, 3)) * TIME_S, takes=(), workspace_bytes=0)
        kind = draw(st.sampled_from(("other makers", "another reader", "reads something else"))) if node.reads else ""
        if kind not in ("another reader", "reads something else"):
            codes = value()
            first, second = replace(like, creates=(codes,)), replace(like, reads=(codes,), random=False)
            sites.append(Site(number, (added(first), added(second))))
            continue
        read, codes, unpacked = draw(st.sampled_from(node.reads)), value(), value()
        pack = replace(like, reads=(read,), creates=(codes,), random=False)
        unpack = replace(like, reads=(codes,), creates=(unpacked,), random=False)
        if kind == "another reader":
            reads = tuple(unpacked if s == read else s for s in own.reads)
            sites.append(Site(number, (added(pack), added(unpack), added(replace(own, reads=reads)))))
        else:
            nodes.pop()
            others = added(pack), added(unpack)
            sites.append(Site(added(own), others, (read, unpacked)))
    charged = [site for site in sites if draw(st.booleans())]
    union = replace(step, nodes=nodes, nbytes=nbytes, once=frozenset(once))
    together = replace(
        union,
        optional=frozenset(n for s in sites for n in ((s.node, *s.others) if s.instead is None else s.others)),
        instead={(s.node, s.instead[0]): s.instead[1:] for s in sites if s.instead is not None},
        families=tuple(_families(sites)),
        draws=_draws(sites, nodes),
        charges=tuple(Charge(frozenset(s.others), draw(st.sampled_from((0.3, 0.7, 1.5)))) for s in charged),
    )
    found = TinyWays(together, tuple(sites))
    least_s = min(sum(n.time_s for n in graph.nodes if not n.collective) for graph in found.each())
    return replace(found, union=replace(together, least_s=least_s))


def _families(sites: Sequence[Site]) -> Iterator[frozenset[int]]:
    """What stands for the node: the reader of what was unpacked, or each of the two that make its value."""
    for site in (s for s in sites if s.instead is None):
        for other in site.others[-1:] if len(site.others) == 3 else site.others:
            yield frozenset((site.node, other))


def _draws(sites: Sequence[Site], nodes: Sequence[ComputeNode]) -> list[tuple[int, ...]]:
    other_of = {s.node: n for s in sites for n in s.others if nodes[n].random}
    later = set(other_of.values())
    found = [n.node for n in nodes if n.random and n.node not in later]
    return [(n, other_of[n]) if n in other_of else (n,) for n in found]
