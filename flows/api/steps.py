"""Settings that all programs of a model share, and the record of one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from stowage.flows.api.live.readings import Key
from stowage.flows.planning.planned import Planned
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.optimizers import KnownOptimizer, OptimizerSignature
from stowage.stages.runtime import Program
from stowage.stages.trace import MicroBatch
from stowage.stages.workload.calls import Loss, Objective

Say = Callable[[str], None]
NewShapes = Literal["plan", "quick", "error"]
MOST = 16
"""Default number of programs that are kept in memory."""
SPARE = 2
"""Number of recorded steps that are kept besides those of the programs in memory."""


@dataclass(frozen=True)
class Steps:
    """Settings that all programs of a model share.

    Attributes:
        loss: see `record_step`.
        objective: see `record_step`.
        accumulate: number of micro-batches of an update.
        max_grad_norm: the norm to clip gradients to, or None.
        roots: other objects that the step may read, by name.
        touches: objects that the step may change besides those that hang on the model and on what computes the loss.
        known_optimizer: what has been learnt of the optimizer.
        most: number of programs that are kept in memory.
        new_shapes: what to do with batches of forms that were not planned ahead; see `fit`.
        ranks: number of ranks that hold a shard of each parameter.
        units: kind of units that are frozen; None where nothing is.
    """

    loss: Loss | None = None
    objective: Objective | None = None
    accumulate: int = 1
    max_grad_norm: float | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    touches: tuple[Any, ...] = ()
    known_optimizer: KnownOptimizer | None = None
    most: int = MOST
    new_shapes: NewShapes = "plan"
    ranks: int = 1
    units: UnitKind | None = None


class KnownSteps(NamedTuple):
    """A program and what it is valid for.

    Attributes:
        optimizer: signature of the optimizer's groups when it was planned.
        key: the batch form and model signature it is valid for.
        micro_batch: the micro-batch it is valid for.
        planned: its plan.
        program: the program.
        version: version of the numbers that its code reads at each call; see `Traced`.
    """

    optimizer: OptimizerSignature | None
    key: Key
    micro_batch: MicroBatch
    planned: Planned
    program: Program
    version: int = 0
