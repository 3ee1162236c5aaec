"""Describes a training step as greedy eviction sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class EvictionStep:
    """The nodes of a step in the order of their first runs, and what each needs and makes.

    Attributes:
        time_s: seconds of each node.
        workspace_bytes: bytes that each node takes besides what it reads and makes.
        reads: values that each node reads, of those that the step makes.
        creates: values that each node makes.
        takes: values over which each node may write its result, if they are dropped right afterwards.
        once: whether each node may run only once.
        last_again: the last node before whose first run each node may still run again: afterwards something that it
            reads is no longer what it was.
        freed_bytes: bytes of what was there before the step and is freed after each node.
        nbytes: bytes of each value.
        stays: values that must be in memory after the step.
    """

    time_s: Sequence[float]
    workspace_bytes: Sequence[int]
    reads: Sequence[tuple[int, ...]]
    creates: Sequence[tuple[int, ...]]
    takes: Sequence[tuple[int, ...]]
    once: Sequence[bool]
    last_again: Sequence[int]
    freed_bytes: Sequence[int]
    nbytes: Sequence[int]
    stays: frozenset[int]

    @cached_property
    def maker(self) -> list[int]:
        """Return the node that makes each value; −1 for what the step does not make."""
        found = [-1] * len(self.nbytes)
        for node, made in enumerate(self.creates):
            for value in made:
                found[value] = node
        return found

    @cached_property
    def readers(self) -> list[list[int]]:
        """Return the nodes that read each value, in the order of their first runs, and at the end what stays."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for node, values in enumerate(self.reads):
            for value in values:
                found[value].append(node)
        for value in self.stays:
            found[value].append(len(self.reads))
        return found

    @cached_property
    def least_bytes(self) -> int:
        """Return bytes that every schedule needs: of the node that needs most at once."""
        needs = (
            sum(self.nbytes[v] for v in {*reads, *creates})
            + workspace
            - max((self.nbytes[v] for v in takes), default=0)
            for reads, creates, workspace, takes in zip(self.reads, self.creates, self.workspace_bytes, self.takes)
        )
        return max(needs, default=0) - sum(self.freed_bytes)
