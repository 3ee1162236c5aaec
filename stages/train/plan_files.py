"""Reads the plan that is trained under, as the stages before have written it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stowage.stages.device import device_of
from stowage.stages.freezing.choice import freezable_of, policy_of
from stowage.stages.freezing.copies import nodes_with_copies
from stowage.stages.ir.command import ARTIFACTS
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.freezable import FreezeChoice
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.plan import Manifest, PlanSummary
from stowage.stages.ir.table import read_record, read_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import Way, kinds_of, stored_variant
from stowage.stages.rewrite.lossy import described
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.settings import Settings
from stowage.stages.train.frozen import FrozenTraining

SOLVE, CODEGEN = ARTIFACTS / "solve", ARTIFACTS / "codegen"

ROUNDING = 1e-9
"""Share of a limit by which a root of a sum of squares may be above it."""


def planned_step(summary: PlanSummary) -> Way:
    """Return the step that the plan is of, put together from the tables of the stages before.

    Raises:
        TableError: a table is missing or damaged, or they do not make this step.
    """
    nodes = read_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode)
    blocks = read_rows(ARTIFACTS / "partition" / "blocks.parquet", Block)
    step = stored_variant(TraceTables.load(ARTIFACTS / "trace"), nodes, blocks, summary.variant)
    choice = planned_freezing()
    if not choice.measures:
        return step
    return replace(step, nodes=nodes_with_copies(step.trace, step.nodes, relative=choice.relative))


def planned_freezing() -> FreezeChoice:
    """Return what the run freezes."""
    return read_record(SOLVE / "freezing.json", FreezeChoice)


def frozen_training(ranks: Ranks | None = None) -> FrozenTraining | None:
    """Return what chooses the units that train in each step, at its beginning; None where nothing is frozen.

    Of several `ranks` the first chooses for all.

    Raises:
        TableError: a table is missing or damaged.
    """
    choice = planned_freezing()
    freezable = freezable_of(TraceTables.load(ARTIFACTS / "trace"), choice)
    if freezable is None:
        return None
    distance = choice.distance if choice.measures else None
    return FrozenTraining(freezable, policy_of(choice), choice.seed, distance, ranks)


def check_device(summary: PlanSummary, kind: str) -> None:
    """Refuse a plan that was made for another device."""
    fingerprint = device_of(kind).fingerprint()
    if summary.device_fingerprint and summary.device_fingerprint != fingerprint:
        raise PlanMismatchError(
            f"The plan was made for {summary.device}, and this machine is another device: make it the target "
            "(`python -m stowage.stages.device`) and run `dvc repro`."
        )


def check_leave(summary: PlanSummary, settings: Settings) -> None:
    """Refuse a plan that keeps values in kinds of codes for which there is no leave, or changes gradients by more.

    The step is made from the name of its variant, so that counts too, whatever else the summary says.
    """
    leave = settings.lossy.leave
    allowed = leave.kinds if leave is not None else ()
    named = kinds_of(summary.variant)
    kinds = {*named, *(kept.partition(":")[0] for kept in summary.lossy)}
    lacking = ", ".join(sorted(kinds.difference(allowed)))
    exact = summary.exact and all(named.values())
    if not exact and lacking:
        raise PlanMismatchError(
            f"Plan {summary.plan_hash} keeps values for backward in {lacking}, which changes gradients, and "
            "lossy.kinds do not allow it: allow it there, or run `dvc repro` for an exact plan."
        )
    if leave is not None and summary.gradient_error > leave.max_gradient_error * (1 + ROUNDING):
        raise PlanMismatchError(
            f"Plan {summary.plan_hash} may change gradients by {summary.gradient_error:.3%}, and "
            f"lossy.max_gradient_error allows {leave.max_gradient_error:.3%}: raise it, or run `dvc repro` for a plan "
            "within it."
        )


def check_errors(summary: PlanSummary, recorded: TraceTables, errors: Iterable[GradientError]) -> None:
    """Refuse a plan that says of itself that it changes gradients by less than what was measured for its codes.

    Args:
        summary: the plan's summary.
        recorded: the step as it was recorded.
        errors: what was measured.
    """
    measured = described(recorded, summary.variant, errors)[1]
    if measured > summary.gradient_error * (1 + ROUNDING):
        raise PlanMismatchError(
            f"Plan {summary.plan_hash} states that it changes gradients by {summary.gradient_error:.3%} at most, and "
            f"by what was measured for its codes it is {measured:.3%}: run `dvc repro`."
        )


def read_source(summary: PlanSummary) -> tuple[str, Manifest]:
    """Return the text of step.py, and its manifest."""
    path = CODEGEN / "step.py"
    manifest = read_record(CODEGEN / "manifest.json", Manifest)
    if not path.is_file():
        raise TableError(f"{path} is missing: run the codegen stage (`dvc repro`).")
    if (manifest.plan_hash, manifest.configuration_hash) != (summary.plan_hash, summary.configuration_hash):
        raise PlanMismatchError(f"{path} belongs to another plan: run the codegen stage (`dvc repro`).")
    try:
        return path.read_text(encoding="utf-8"), manifest
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read ({error}): run the codegen stage (`dvc repro`).") from error
