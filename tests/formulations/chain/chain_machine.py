"""Every persistent schedule of a tiny chain, and what each needs by plain counting: no dynamic programming.

A schedule is persistent when what is kept for a block stays until that block's backward (thesis 2.5). Bytes are counted
from the list of steps alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, ChainStep


def persistent_schedules(blocks: Sequence[ChainBlock], s: int = 0, t: int | None = None) -> Iterator[list[ChainStep]]:
    """All ways to run blocks s..t forward and backward."""
    last = len(blocks) - 1
    t = last if t is None else t
    if s > t:
        yield []
        return
    last_run = s == t and t < last
    for option in range(len(blocks[s].options)):
        for inner in persistent_schedules(blocks, s + 1, t):
            yield [ChainStep("forward", s, option, last_run), *inner, ChainStep("backward", s, option, last_run)]
    for kept in range(s + 1, t + 1):
        fast = [ChainStep("fast", s)]
        for j in range(s + 1, kept):
            fast += [ChainStep("fast", j), ChainStep("drop", j)]
        for after in persistent_schedules(blocks, kept, t):
            for before in persistent_schedules(blocks, s, kept - 1):
                yield [*fast, *after, ChainStep("drop", kept), *before]


def option_of(blocks: Sequence[ChainBlock], step: ChainStep) -> ChainOption:
    """The option that a step runs with."""
    block = blocks[step.block]
    return (block.last_run_options if step.last_run else block.options)[step.option]


def time_of(blocks: Sequence[ChainBlock], steps: Sequence[ChainStep]) -> float:
    """Seconds of a schedule; an option's time is that of both its parts."""
    total = 0.0
    for step in steps:
        if step.kind == "fast":
            total += blocks[step.block].fast_time_s
        elif step.kind == "forward":
            total += option_of(blocks, step).time_s
    return total


def peak_of(blocks: Sequence[ChainBlock], steps: Sequence[ChainStep]) -> int:
    """Highest bytes of a schedule, the chain's first input left out; checks that inputs are there."""
    inputs: set[int] = {0}
    saved: dict[int, int] = {}
    todo = len(blocks)  # blocks whose backward has not run
    peak = 0

    def kept() -> int:
        return sum(blocks[i].input_bytes for i in inputs if i) + sum(saved.values())

    for step in steps:
        block = blocks[step.block]
        waiting = blocks[todo - 1].gradient_bytes + blocks[todo - 1].resident_bytes
        if step.kind == "drop":
            inputs.remove(step.block)
            continue
        if step.kind != "backward":
            assert step.block in inputs or step.block - 1 in saved, f"{step} lacks its input"
        if step.kind == "fast":
            peak = max(peak, kept() + block.fast_peak_bytes + waiting)
            inputs.add(step.block + 1)
        elif step.kind == "forward":
            option = option_of(blocks, step)
            peak = max(peak, kept() + option.forward_peak_bytes + waiting)
            saved[step.block] = option.save_bytes
        else:
            assert step.block == todo - 1, "backward runs from the last block to the first"
            del saved[step.block]
            peak = max(peak, kept() + option_of(blocks, step).backward_peak_bytes + block.resident_bytes)
            todo -= 1
    assert todo == 0
    assert not saved
    assert inputs == {0}
    return peak


def with_drops(steps: Sequence[ChainStep]) -> list[ChainStep]:
    """A schedule that leaves out `drop`, with every input dropped right after its last use."""
    last: dict[int, int] = {}
    owner: dict[int, int] = {}
    for position, step in enumerate(steps):
        if step.block in owner:
            last[owner[step.block]] = position
        if step.kind == "fast":
            owner[step.block + 1] = position
    drops = {used: steps[made].block + 1 for made, used in last.items()}
    found: list[ChainStep] = []
    for position, step in enumerate(steps):
        found.append(step)
        if position in drops:
            found.append(ChainStep("drop", drops[position]))
    return found
