"""Makes lines and bars for plots: memory over time, and what runs when; merged and thinned to what a plot can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stowage.stages.ir.graph import ComputeNode
from stowage.stages.ir.plan import PlanRow
from stowage.stages.ir.run import MemorySample

Kind = Literal["forward", "recompute", "backward", "update"]
KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward", "update")
_COLUMNS = 1200


@dataclass(frozen=True)
class PlotLine:
    """A line to draw: bytes over seconds; times never decrease."""

    times_s: tuple[float, ...]
    nbytes: tuple[int, ...]

    @property
    def peak(self) -> tuple[float, int]:
        """Return when the highest point is first reached, and its bytes."""
        highest = max(self.nbytes)
        return self.times_s[self.nbytes.index(highest)], highest


@dataclass(frozen=True)
class PlotSpan:
    """An unbroken stretch of one kind of work of one block, on one stream."""

    stream: str
    kind: Kind
    block: int
    start_s: float
    end_s: float


def predicted(rows: Sequence[PlanRow]) -> PlotLine:
    """Return device bytes as the plan's rows state them: the peak during each row, then what is resident after it."""
    points: list[tuple[float, int]] = []
    for row in rows:
        points += [(row.start_s, row.peak_bytes), (row.end_s, row.peak_bytes), (row.end_s, row.resident_bytes)]
    return thin(points)


def measured(samples: Sequence[MemorySample], series: str) -> PlotLine:
    """Return the device bytes of one series of allocator events, as steps."""
    points: list[tuple[float, int]] = []
    for sample in samples:
        if sample.series == series:
            if points:
                points.append((sample.time_s, points[-1][1]))
            points.append((sample.time_s, sample.resident_bytes))
    return thin(points)


def thin(points: Sequence[tuple[float, int]], columns: int = _COLUMNS) -> PlotLine:
    """Keep at most four points for each column: its first, lowest, highest and last, in order; so no peak is lost."""
    if len(points) > 4 * columns:
        start, end = points[0][0], points[-1][0]
        width = (end - start) / columns or 1.0
        kept: list[tuple[float, int]] = []
        bucket: list[tuple[float, int]] = []
        column = 0
        for point in points:
            at = int((point[0] - start) / width)
            if at != column:
                kept += _corners(bucket)
                bucket, column = [], at
            bucket.append(point)
        points = kept + _corners(bucket)
    return PlotLine(tuple(t for t, _ in points), tuple(b for _, b in points))


def _corners(bucket: list[tuple[float, int]]) -> list[tuple[float, int]]:
    if len(bucket) <= 4:
        return bucket
    levels = [b for _, b in bucket]
    chosen = {0, levels.index(min(levels)), levels.index(max(levels)), len(bucket) - 1}
    return [bucket[i] for i in sorted(chosen)]


def turns(found: Sequence[PlotSpan]) -> list[list[PlotSpan]]:
    """Return unbroken stretches of one block's forward, or of its backward with recomputation and updates."""
    groups: list[list[PlotSpan]] = []
    for span in found:
        last = groups[-1][-1] if groups else None
        forward = span.kind == "forward"
        if (
            last is not None
            and (last.stream, last.block) == (span.stream, span.block)
            and ((last.kind == "forward") == forward)
        ):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def spans(rows: Sequence[PlanRow], nodes: Sequence[ComputeNode]) -> list[PlotSpan]:
    """Return compute rows on the compute stream, with neighbours of one kind and block merged."""
    by_node = {n.node: n for n in nodes}
    found: list[PlotSpan] = []
    for row in rows:
        if row.action != "compute":
            continue
        node = by_node[row.node]
        kind: Kind = "recompute" if row.recompute else node.phase
        last = found[-1] if found else None
        if last is not None and last.kind == kind and last.block == node.block:
            found[-1] = PlotSpan("compute", kind, node.block, last.start_s, row.end_s)
        else:
            found.append(PlotSpan("compute", kind, node.block, row.start_s, row.end_s))
    return found
