"""Costs options, and makes the schedule of a block's last run.

In its last run nobody needs the block's output any more (`rk_rotor` says when), and its effects have happened. This is
no part of the referee: it makes schedules, and asks the referee of blocks what they cost and whether they are legal.
"""

from __future__ import annotations

from dataclasses import replace

from stowage.stages.ir.block import Action, BlockGraph, BlockSchedule
from stowage.stages.ir.encoding import schedule_of
from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.executions import needed_runs
from stowage.stages.ir.plan import Option
from stowage.stages.simulate.block import BlockCost, replay_block


def with_costs(option: Option, graph: BlockGraph) -> Option:
    """Return the option with the costs of its schedule.

    Raises:
        IllegalPlanError: the schedule is illegal.
    """
    cost = replay_block(graph, schedule_of(option))
    return replace(
        option,
        forward_time_s=cost.forward_time_s,
        backward_time_s=cost.backward_time_s,
        save_bytes=cost.save_bytes,
        forward_peak_bytes=cost.forward_peak_bytes,
        backward_peak_bytes=cost.backward_peak_bytes,
        recomputed_bytes=cost.recomputed_bytes,
    )


def with_last_run_costs(option: Option, graph: BlockGraph) -> Option:
    """Return the option with the costs of its last run.

    Where its schedule cannot do without what only the output needs, the last run is a run like any other.

    Raises:
        IllegalPlanError: the schedule is illegal.
    """
    last, _ = _last_run(graph, schedule_of(option))
    return replace(
        option,
        last_run_time_s=last.forward_time_s + last.backward_time_s,
        last_run_save_bytes=last.save_bytes,
        last_run_forward_peak_bytes=last.forward_peak_bytes,
        last_run_backward_peak_bytes=last.backward_peak_bytes,
    )


def last_run_of(option: Option, graph: BlockGraph) -> BlockSchedule:
    """Return the schedule of the option's last run."""
    return _last_run(graph, schedule_of(option))[1]


def _last_run(graph: BlockGraph, schedule: BlockSchedule) -> tuple[BlockCost, BlockSchedule]:
    relaxed = graph.on_last_run
    last_run = _without_output(relaxed, schedule)
    try:
        return replay_block(relaxed, last_run), last_run
    except IllegalPlanError:
        return replay_block(graph, schedule), schedule


def _without_output(graph: BlockGraph, schedule: BlockSchedule) -> BlockSchedule:
    """Return the schedule without executions that served the block's output alone.

    Nodes that run once are dropped too if they create nothing: they ran when the block ran first.
    """
    nodes, border = graph.nodes, len(schedule.forward)
    computed = [
        (number, action)
        for number, action in enumerate([*schedule.forward, *schedule.backward])
        if action.kind == "compute"
    ]
    order = [action.index for _, action in computed]
    backward = [k >= graph.forward_count for k in order]
    needed = needed_runs(order, backward, set(graph.outgoing), lambda k: nodes[k].creates, lambda k: nodes[k].reads)
    kept = [computed[position] for position in needed]
    last: dict[int, int] = {}
    following: list[list[int]] = []
    alive: dict[int, int] = dict.fromkeys(graph.incoming, -1)
    for position, (_, action) in enumerate(kept):
        node = graph.nodes[action.index]
        for a in node.creates:
            if a in alive:
                following[max(last[a], 0)].append(a)
            alive[a], last[a] = position, position
        for a in node.reads:
            last[a] = position
        following.append([])
    for a in alive:
        if a not in graph.outgoing:
            following[last.get(a, len(kept) - 1)].append(a)
    parts: tuple[list[Action], list[Action]] = ([], [])
    for (number, action), dying in zip(kept, following):
        part = parts[0] if number < border else parts[1]
        part.append(action)
        part.extend(Action("free", a) for a in sorted(dying))
    return BlockSchedule(tuple(parts[0]), tuple(parts[1]))
