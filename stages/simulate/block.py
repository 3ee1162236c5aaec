"""Judges one block's schedule by plain replay: legality, memory and time. It shares no code with any solver."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule
from stowage.stages.ir.errors import IllegalPlanError


@dataclass(frozen=True)
class BlockCost:
    """The cost of a schedule of a block (thesis 2.5.1); bytes leave out the block's input, which the chain keeps.

    Attributes:
        forward_time_s, backward_time_s: compute time of each part.
        save_bytes: in memory between forward and backward, the block's output included.
        forward_peak_bytes, backward_peak_bytes: highest memory in each part; the backward part includes the incoming
            gradient and what was saved.
        recomputed_bytes: bytes of distinct allocations made in forward that are made again.
    """

    forward_time_s: float
    backward_time_s: float
    save_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    recomputed_bytes: int


def replay_block(graph: BlockGraph, schedule: BlockSchedule, *, complete: bool = True) -> BlockCost:
    """Replay `schedule`; raise `IllegalPlanError` at the first illegal row.

    Args:
        graph: the block.
        schedule: the schedule of its nodes.
        complete: False replays only the forward part (a fast-forward, which has no backward part).
    """
    live: set[int] = set()
    made: set[int] = set()
    runs = [0] * len(graph.nodes)
    recomputed: set[int] = set()
    bytes_of = [a.nbytes for a in graph.allocations]

    def nbytes(indices: set[int] | tuple[int, ...]) -> int:
        return sum(map(bytes_of.__getitem__, indices))

    def illegal(part: str, row: int, text: str) -> IllegalPlanError:
        return IllegalPlanError(f"{part} row {row}: {text}")

    def play(actions: tuple[Action, ...], part: str) -> tuple[float, int]:
        time_s, used = 0.0, nbytes(live)
        peak = used
        for row, action in enumerate(actions):
            if action.kind == "free":
                if action.index not in live:
                    raise illegal(part, row, f"frees allocation {action.index}, which is not in memory")
                live.discard(action.index)
                used -= bytes_of[action.index]
                continue
            node = graph.nodes[action.index]
            missing = [i for i in node.reads if i not in live]
            if missing:
                raise illegal(part, row, f"node {action.index} ({node.name}) reads {missing}, not in memory")
            again = [i for i in node.creates if i in live]
            if again:
                raise illegal(part, row, f"node {action.index} ({node.name}) makes {again}, still in memory")
            if node.once and runs[action.index]:
                raise illegal(part, row, f"node {action.index} ({node.name}) may run only once")
            if part == "forward" and action.index >= graph.forward_count:
                raise illegal(part, row, f"backward node {action.index} ({node.name}) before the loss")
            if runs[action.index] and action.index < graph.forward_count:
                recomputed.update(i for i in node.creates if i in made)
            runs[action.index] += 1
            made.update(node.creates)
            live.update(node.creates)
            used += nbytes(node.creates)
            peak = max(peak, used + node.workspace_bytes)
            time_s += node.time_s
        return time_s, peak

    forward_time_s, forward_peak = play(schedule.forward, "forward")
    absent = [i for i in graph.output if i not in live]
    if absent:
        raise IllegalPlanError(f"forward ends without the block's output {absent}")
    save = nbytes(live)
    if not complete:
        return BlockCost(forward_time_s, 0.0, save, forward_peak, 0, 0)
    live.update(graph.incoming)
    backward_time_s, backward_peak = play(schedule.backward, "backward")
    never = [k for k, count in enumerate(runs) if not count]
    if never:
        raise IllegalPlanError(f"nodes {never} never run")
    if live != set(graph.outgoing):
        raise IllegalPlanError(f"backward ends with {sorted(live)} in memory, not with {sorted(graph.outgoing)}")
    return BlockCost(
        forward_time_s=forward_time_s,
        backward_time_s=backward_time_s,
        save_bytes=save,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        recomputed_bytes=nbytes(recomputed),
    )
