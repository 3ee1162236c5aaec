"""Makes programs that read numbers at each call: the same plan, with its code generated anew."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from stowage.flows.api.live.readings import Traced
from stowage.flows.planning.planned import Planned, write_plan
from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.trace import TraceTables
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.rewrite import rewritten
from stowage.stages.runtime import Program
from stowage.stages.runtime.program import constant_tensors
from stowage.stages.trace import MicroBatch, with_updates

LIVE = "-live"
"""Suffix of the folder of a plan whose `step.py` reads numbers at each call."""


def with_live_numbers(
    planned: Planned,
    traced: Traced,
    model: nn.Module,
    optimizer: KnownOptimizer | None,
    micro_batch: MicroBatch,
) -> Planned:
    """Return the same plan with a `step.py` that reads `traced.names` at each call."""
    whole = with_updates(traced.marked(), model, optimizer=optimizer, micro_batch=micro_batch)
    trace = rewritten(whole, planned.summary.variant)
    if _structure(trace) != _structure(planned.trace):
        raise AssertionError(f"the rewrite of plan {planned.summary.plan_hash} depends on numbers of the step")
    source = emit_step(trace, planned.nodes, planned.rows, planned.summary, planned.slots)
    name = planned.folder.name.removesuffix(LIVE)
    return write_plan(
        replace(
            planned,
            source=source,
            manifest=manifest_of(source, planned.summary.plan_hash, planned.trace.meta.configuration_hash),
            folder=planned.folder.with_name(name + LIVE),
        )
    )


def set_numbers(program: Program, traced: Traced) -> None:
    """Let a program read the numbers and constants of the state that its step was found for."""
    program.numbers = traced.numbers
    recorded = traced.recorded
    if recorded is not None and recorded.constants:
        constants = traced.constants if traced.constants is not None else recorded.constants
        if program.constants_of is not constants:
            program.replace_constants(constant_tensors(constants, recorded.values, program.device))
            program.constants_of = constants


def _structure(trace: TraceTables) -> tuple[object, ...]:
    calls = [(c.target, c.reads, c.returns, c.mutates, c.signature) for c in trace.calls]
    return calls, trace.values, trace.storages, trace.gradients
