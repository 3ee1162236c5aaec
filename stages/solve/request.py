"""Says what a plan is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stowage.stages.ir.defaults import EVICTION_RULES, MEMORY_SLOTS, METHOD, O_ILP_GAP, O_ILP_SEARCHES, O_ILP_SECONDS
from stowage.stages.ir.lossy import GradientError
from stowage.stages.ir.methods import METHODS, method_of
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solver.outcome import SolverSettings

EXACT = "exact"
"""Stands in `PlanRequest.rewrite` for all rewrites that nobody has to ask for: they are exact."""

TOGETHER = "together"
"""Stands there for all that are of use where everything trains, of which exact ones are not looked for apart too."""

FIXED = tuple(m.name for m in METHODS if m.fixed)
"""Policies that may be asked for by name; see `formulations/chain/policies.py`."""

COMPARED = tuple(m.name for m in METHODS if m.compared)
"""Methods to compare with: they must not borrow from others."""


def check_method(method: str) -> None:
    """Raise `ParameterError` unless there is such a method."""
    method_of(method)


@dataclass(frozen=True)
class PlanRequest:
    """Says what the plan of an iteration is to be.

    Attributes:
        device_budget_bytes: device bytes of the whole iteration: parameters, optimizer states, buffers, inputs,
            gradients, activations, workspace.
        method: the name of one in `ir/methods.py`, which says what each does.
        slots: memory slots of RK-Rotor.
        device, device_fingerprint: stated in the summary.
        options_limits: limits of the solves that found the options, stated in the summary of a plan made of them.
        o_ilp_limits: limits of one solve of O-ILP.
        o_ilp_searches: searches with O-ILP that a plan with a lower tier may take, see `OffMate`; with 0 rules alone
            decide what is offloaded, unless the method is one of O-ILP's.
        eviction_rules: rules of greedy eviction that are tried; 0 for none.
        lower_tier: the lower tier, if the plan may use one.
        offloaded_at_rest: names of parameters, states and gradients, as slots have them, that the plan of another
            micro-batch of the same training offloads between iterations: they had better be offloaded in this one too.
        lossy: whether rewrites that change numbers are allowed.
        errors: what they do to the gradient, as was measured.
        cut_seconds: time to bound every schedule by cuts, and to find schedules by them; 0 for neither.
        planning_since_s: when planning began, on the clock of `time.monotonic`. Cuts, and greedy eviction, then take at
            most a share of the time since (see `time_share`), so that a plan that is found at once is not waited for;
            None gives the ones all of `cut_seconds`, and the other the time for all its rules.
        enough: nothing slower to find is tried beside a plan that takes at most so many times as long as its lower
            bound; 0 where everything is.
        ways: how many ways to compute the step are planned, which share the time of greedy eviction.
        is_mixture: the step mixes rewrites. It is planned where a rewrite alone has a plan, so that nobody asks for the
            least memory that it needs.
        max_gradient_error: most that all of a plan's may do together, see `Lossy`.
        rewrite: the one rewrite that plans are of, or `EXACT`, or `TOGETHER`; by default any but those with codes for
            what is frozen, which take memory where everything trains.
    """

    device_budget_bytes: int
    method: str = METHOD
    slots: int = MEMORY_SLOTS
    device: str = ""
    device_fingerprint: str = ""
    options_limits: SolverSettings = field(default_factory=lambda: SolverSettings(time_limit_s=0.0))
    o_ilp_limits: SolverSettings = field(default_factory=lambda: SolverSettings(O_ILP_SECONDS, O_ILP_GAP))
    o_ilp_searches: int = O_ILP_SEARCHES
    eviction_rules: int = EVICTION_RULES
    lower_tier: LowerTier | None = None
    offloaded_at_rest: frozenset[str] = frozenset()
    lossy: bool = False
    errors: Sequence[GradientError] = ()
    cut_seconds: float = 0.0
    planning_since_s: float | None = None
    enough: float = 0.0
    ways: int = 1
    is_mixture: bool = False
    max_gradient_error: float = math.inf
    rewrite: str = ""

    def __post_init__(self) -> None:
        check_method(self.method)

    @property
    def recomputes_only(self) -> bool:
        """Return whether plans that use the lower tier do not count."""
        return method_of(self.method).recomputes_only

    @property
    def polishes(self) -> bool:
        """Return whether what still fits is kept instead of made again."""
        return method_of(self.method).polishes

    def takes(self, formulation: str) -> bool:
        """Return whether schedules of blocks that a formulation found are options."""
        return method_of(self.method).takes(formulation)

    @property
    def offloads_only(self) -> bool:
        """Return whether plans that keep everything in the device do not count."""
        return method_of(self.method).offloads
