"""Finds what must be in memory while a node runs between two cuts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from stowage.stages.formulations.cuts.domain import Domain
from stowage.stages.formulations.cuts.step_graph import StepGraph

Key = tuple[int, int]


@dataclass(frozen=True)
class Beside:
    """A value that is in memory while a node h has its first run, in interval i, unless something makes it again.

    Attributes:
        value: s.
        remade: the run in which it may be made after h, for the first time or again, as (maker(s), i); None where
            nothing makes it then.
        twice: whether that is a second run in the interval: the first comes before h.
        until: the cut at which it is needed if it is kept there, as (s, i + 1); None where a node that follows h needs
            it for certain.
    """

    value: int
    remade: Key | None
    twice: bool
    until: Key | None


def besides(step: StepGraph, domain: Domain, cuts: Sequence[int], node: int) -> Iterator[Beside]:
    """Yield what must be in memory beside a node whose first run is in one interval for certain.

    A value that is needed after h, in the interval or at its end, and that nothing makes in between has been there
    since before h. What h itself reads or makes is not yielded.
    """
    interval, latest = domain.first[node]
    if interval != latest:
        raise ValueError(f"the first run of node {node} may be in several intervals")
    own = {*step.reads[node], *step.nodes[node].creates}
    for value, readers in step.readers.items():
        if value in own:
            continue
        maker = step.maker.get(value)
        remade: Key | None = None
        twice = False
        if maker is not None:
            if domain.first[maker][0] > interval:
                continue
            before = step.precedes(maker, node)
            if domain.first[maker] == (interval, interval):
                if not before:
                    continue  # its first run may come after h
                twice = True
            if maker not in step.once or not before:
                remade = (maker, interval)  # of what runs once too: that run may come after h
        until = (value, interval + 1)
        last = interval == len(cuts)
        certain = _read_after(step, domain, readers, node, interval)
        certain |= value in step.stays if last else until in domain.sure_keeps
        if certain:
            yield Beside(value, remade, twice, None)
        elif not last and until in domain.free_keeps:
            yield Beside(value, remade, twice, until)


def _read_after(step: StepGraph, domain: Domain, readers: Collection[int], node: int, interval: int) -> bool:
    sure = (interval, interval)
    return any(domain.first[r] == sure and step.precedes(node, r) for r in readers)


def touched_bytes(step: StepGraph, node: int) -> int:
    """Return the bytes that a node needs by itself: what it reads and makes, and its workspace."""
    own = {*step.reads[node], *step.nodes[node].creates}
    return sum(step.nbytes[s] for s in own) + step.nodes[node].workspace_bytes - step.taken_bytes(node)
