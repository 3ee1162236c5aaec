"""The table of the sources of schedules: one row for each formulation of a block or cluster.

A new formulation is its folder in `formulations`, and a row here: it then takes part in the search, its schedules are
judged by the referee, and stored options are solved again when its code changes. Exact ones are asked when
`options.formulation` (of blocks) or `options.cluster_formulation` (of clusters) names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stowage.stages.formulations.block.checkmate import checkmate
from stowage.stages.formulations.block.fixed import keep_all, recompute_all
from stowage.stages.formulations.block.greedy.selective import selective_frontier
from stowage.stages.formulations.block.rk_checkmate.solve import rk_checkmate
from stowage.stages.formulations.block.tw_remat.solve import tw_remat
from stowage.stages.formulations.cluster.answer import Budgets, HAnswer
from stowage.stages.formulations.cluster.h_ilp.solve import HIlpSolver
from stowage.stages.formulations.cluster.policies import Incumbents
from stowage.stages.formulations.cluster.problem import HProblem
from stowage.stages.formulations.cluster.retention.solve import HRetention
from stowage.stages.formulations.cluster.staged_order import HRuns
from stowage.stages.ir.block import BlockGraph, BlockSchedule, SolveReport
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.h_graph import HGraph
from stowage.stages.options.intervals import ExactSolve, answering, retention_intervals
from stowage.stages.solver.outcome import SolverSettings


class ClusterSolver(Protocol):
    """A formulation over one H-Graph, prepared for many pairs of budgets."""

    @property
    def data(self) -> HProblem:
        """Return the H-Graph with the facts that follow from it."""
        ...

    @property
    def incumbents(self) -> Incumbents:
        """Return schedules to start from."""
        ...

    def smallest_peak(self) -> tuple[HRuns, int]:
        """Find executions with (nearly) the least M_peak, and that peak in bytes."""
        ...

    def solve(self, budgets: Budgets, known: Sequence[HAnswer]) -> HAnswer:
        """Find the fastest schedule within one pair of budgets, given answers for others."""
        ...


@dataclass(frozen=True)
class OptionSource:
    """The properties that all formulations have.

    Attributes:
        name: name of the formulation, as its reports and `params.yaml` have it.
        code: module or package of its own, as it is imported: options of older code are not used.
    """

    name: str
    code: str


@dataclass(frozen=True)
class Fixed(OptionSource):
    """A formulation that makes one schedule of each block, always an option.

    Attributes:
        solve: makes the schedule of a block.
    """

    solve: Callable[[BlockGraph], BlockSchedule]


@dataclass(frozen=True)
class Frontier(OptionSource):
    """A formulation that makes schedules from much memory to little, of blocks of any size.

    Attributes:
        solve: makes schedules with reports for a block and a number of levels of memory to try.
        small: it takes part where blocks are solved exactly too.
    """

    solve: Callable[[BlockGraph, int], Sequence[tuple[BlockSchedule, SolveReport]]]
    small: bool = True


@dataclass(frozen=True)
class Exact(OptionSource):
    """A formulation that finds the fastest schedule of a block for one pair of budgets.

    Attributes:
        solve: finds the schedule; `answering` makes it from a plain function.
        takes_tiny: it solves tiny blocks too, whichever formulation the settings name.
    """

    solve: ExactSolve
    takes_tiny: bool = False


@dataclass(frozen=True)
class ClusterSource(OptionSource):
    """A formulation that finds the fastest schedule of a cluster with clusters inside, for one pair of budgets.

    Attributes:
        prepare: makes a solver from an H-Graph and the limits of each solve.
        share: share of the time limit of a block's solve: H-Graphs are solved for many budgets, from a schedule that
            is good already.
    """

    prepare: Callable[[HGraph, SolverSettings], ClusterSolver]
    share: float = 0.3


_BLOCK, _CLUSTER = "stowage.stages.formulations.block", "stowage.stages.formulations.cluster"

SOURCES: tuple[OptionSource, ...] = (
    Fixed("keep_all", f"{_BLOCK}.fixed", keep_all),
    Fixed("recompute_all", f"{_BLOCK}.fixed", recompute_all),
    # Where blocks are solved exactly, its schedules are found anyway: the solver starts from them.
    Frontier("selective", f"{_BLOCK}.greedy", selective_frontier, small=False),
    Frontier("tw_remat", f"{_BLOCK}.tw_remat", tw_remat),
    Exact("retention", f"{_BLOCK}.retention", retention_intervals),
    Exact("rk_checkmate", f"{_BLOCK}.rk_checkmate", answering(rk_checkmate), takes_tiny=True),
    Exact("checkmate", f"{_BLOCK}.checkmate", answering(checkmate), takes_tiny=True),
    ClusterSource("h_retention", f"{_CLUSTER}.retention", HRetention),
    # The first answer of a MILP takes longest.
    ClusterSource("h_ilp", f"{_CLUSTER}.h_ilp", HIlpSolver, share=1.0),
)
"""All sources, in the order in which they are asked."""

S = TypeVar("S", bound=OptionSource)


def sources_of(kind: type[S]) -> list[S]:
    """Return all sources of one kind."""
    return [source for source in SOURCES if isinstance(source, kind)]


def source_of(kind: type[S], name: str, key: str) -> S:
    """Return the source of a name.

    Args:
        kind: the kind it must be of.
        name: its name.
        key: the key of `params.yaml`, for the message.

    Raises:
        ParameterError: there is none.
    """
    known = sources_of(kind)
    for source in known:
        if source.name == name:
            return source
    names = ", ".join(repr(source.name) for source in known)
    raise ParameterError(f"{key} must be one of {names}, and is {name!r}; correct the value.")
