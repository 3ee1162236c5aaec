"""Describes the lower tier as the cut formulation sees it: rates, what lasts, and which updates the CPU may do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stowage.stages.formulations.cuts.step_graph import StepGraph, both_lanes_s
from stowage.stages.ir.machine import Link
from stowage.stages.ir.trace import TraceTables


@dataclass(frozen=True)
class Below:
    """The lower tier of one step.

    Attributes:
        link: the link between it and the device.
        lasting: storages that outlive the step, such as parameters and states: on the device or below between steps.
        weights: the parameters among them.
        touches: for each node those of them that it reads or changes.
        changes: for each node those that it changes.
        cpu_update_s: seconds of each update that the CPU may do, by its node.
        disk: whether a disk is behind it, to which copies pass through it.
    """

    link: Link
    lasting: frozenset[int]
    weights: frozenset[int]
    touches: tuple[tuple[int, ...], ...]
    changes: tuple[tuple[int, ...], ...]
    cpu_update_s: Mapping[int, float]
    disk: bool = False

    @property
    def slowed(self) -> float:
        """Return c: the time of one direction alone that a copy in the other takes of it, in that copy's time alone.

        While both are busy each has a share σ = rate↕ / (rate↓ + rate↑) of its own rate. In a time t in which both are
        busy for a part, down ≤ rate↓ (t − (1 − σ) both) and up ≤ rate↑ σ both + rate↑ (t − both − …), so that with
        c = (1 − σ) / σ, but 1 at most, down / rate↓ + c up / rate↑ ≤ t, and likewise the other way. With a disk behind
        the host a direction may be busy at less than its rate: then nothing is said here.
        """
        both = self.link.offload_bytes_per_s + self.link.reload_bytes_per_s
        share = min(1.0, self.link.duplex_bytes_per_s / both)
        return 0.0 if self.disk else min(1.0, (1 - share) / share)

    @property
    def both_bytes_per_s(self) -> float:
        """Return a rate that both directions together do not exceed; infinite where `slowed` says more."""
        link = self.link
        most = max(link.duplex_bytes_per_s, link.offload_bytes_per_s, link.reload_bytes_per_s)
        return most if self.disk else math.inf

    def once_s(self, step: StepGraph) -> float:
        """Return the time of every node once, collectives beside computing, without the updates that the CPU may do."""
        nodes = [n for n in step.nodes if n.node not in self.cpu_update_s]
        computing_s = sum(n.time_s for n in nodes if not n.collective)
        return both_lanes_s(computing_s, sum(n.time_s for n in nodes if n.collective))

    @staticmethod
    def of(
        trace: TraceTables, step: StepGraph, link: Link, cpu_update_s: Mapping[int, float], *, disk: bool = False
    ) -> Below:
        """Describe the lower tier of a trace.

        Args:
            trace: the trace of the step.
            step: its graph.
            link: the link to the lower tier.
            cpu_update_s: seconds of updates on the CPU, by node; infinite where the CPU cannot do one.
            disk: whether a disk is behind it.
        """
        lasting = frozenset(s.storage for s in trace.storages if s.role != "temporary") - step.waiting
        parameters = frozenset(s.storage for s in trace.storages if s.role == "parameter")
        possible = {
            n.node: cpu_update_s[n.node]
            for n in step.nodes
            if math.isfinite(cpu_update_s.get(n.node, math.inf)) and not parameters.isdisjoint(n.mutates)
        }
        return Below(
            link,
            lasting,
            lasting & parameters,
            tuple(tuple(sorted(lasting.intersection((*n.reads, *n.mutates)))) for n in step.nodes),
            tuple(tuple(sorted(lasting.intersection(n.mutates))) for n in step.nodes),
            possible,
            disk,
        )
