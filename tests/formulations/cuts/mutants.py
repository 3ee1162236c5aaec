"""Graphs that say more of a step than is so: each demands what a legal schedule may do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stowage.stages.formulations.cuts.step_graph import StepGraph

Mutant = Callable[[StepGraph], StepGraph]


def waiting_counts_throughout(step: StepGraph) -> StepGraph:
    """Gradients that wait stay in memory to the end."""
    waiting_bytes = sum(step.nbytes[s] for s in step.waiting)
    nbytes = [0 if s in step.waiting else size for s, size in enumerate(step.nbytes)]
    return replace(step, nbytes=nbytes, base_bytes=step.base_bytes + waiting_bytes)


def what_draws_runs_once(step: StepGraph) -> StepGraph:
    """Nothing that draws random numbers may do so again."""
    return replace(step, once=step.once | {n.node for n in step.nodes if n.random})


def sums_save_nothing(step: StepGraph) -> StepGraph:
    """No sum is written over a summand."""
    return replace(step, nodes=[replace(n, takes=()) for n in step.nodes])


def numbers_are_an_order(step: StepGraph) -> StepGraph:
    """Every node comes after the one before it."""
    return replace(step, after={n: tuple({*step.after.get(n, ()), n - 1}) for n in range(1, len(step.nodes))})


def what_reads_changed_weights_runs_once(step: StepGraph) -> StepGraph:
    """What uses a weight before it is updated may not run again before that either."""
    return replace(step, once=step.once.union(*step.after.values()))


def what_is_written_over_is_made_once(step: StepGraph) -> StepGraph:
    """What makes a value that another node changes may not run again."""
    return replace(step, once=step.once | {step.maker[s] for n in step.nodes for s in n.mutates if s in step.maker})


def gradients_of_updates_stay(step: StepGraph) -> StepGraph:
    """What an update reads is there to the end."""
    read = {s for n in step.nodes if n.phase == "update" for s in n.reads}
    return replace(step, stays=step.stays | read.intersection(step.maker))


def what_stays_is_made_once(step: StepGraph) -> StepGraph:
    """What the step leaves behind may not be dropped and made again."""
    return replace(step, once=step.once | {step.maker[s] for s in step.stays})


def exchanges_hold_up_computing(step: StepGraph) -> StepGraph:
    """There is one lane for all."""
    return replace(step, nodes=[replace(n, collective=False) for n in step.nodes])


MUTANTS: tuple[Mutant, ...] = (
    waiting_counts_throughout,
    what_draws_runs_once,
    sums_save_nothing,
    numbers_are_an_order,
    what_reads_changed_weights_runs_once,
    what_is_written_over_is_made_once,
    gradients_of_updates_stay,
    what_stays_is_made_once,
    exchanges_hold_up_computing,
)
