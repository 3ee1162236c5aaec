"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.errors import ParameterError
from stowage.stages.solve.offload.offloader import Below

FIXED = ("recompute_all", "chen_sqrt")
"""Policies that may be asked for by name; see `policies.py`."""

WHOLE = ("hiremate", "h_ilp", "tw_remat")
"""Methods that take the whole step as one block."""

COMPARED = ("rotor", "h_ilp", "tw_remat")
"""Methods that must not borrow from others."""

METHODS = ("auto", "rockmate", "hiremate", "offmate", *COMPARED, *FIXED, "offmate_preprint")


def check_method(method: str) -> None:
    """Raise `ParameterError` unless there is such a method."""
    if method not in METHODS:
        raise ParameterError(f"method is one of {', '.join(METHODS[:-1])}, not {method!r}.")


@dataclass(frozen=True)
class PlanRequest:
    """What the plan of an iteration is to be.

    Attributes:
        device_budget_bytes: device bytes of the whole iteration: parameters, optimizer states, buffers, inputs,
            gradients, activations, workspace.
        method: `auto` keeps everything if that fits and else the fastest of RK-Rotor and the fixed policies; `rockmate`
            takes RK-Rotor's best; `hiremate` the same for one block, the whole step (see `partition`); `offmate` the
            best of the plans that offload. To compare with: `offmate_preprint` has three options per block and offloads
            whole blocks; `rotor` keeps all of a block or nothing; `h_ilp` and `tw_remat` are parts of `hiremate` alone;
            `recompute_all` and `chen_sqrt` are fixed.
        slots: memory slots of RK-Rotor.
        device, device_fingerprint, time_limit_s, seed: stated in the summary.
        below: the tier below the device, if the plan may use one.
        away: names of parameters, states and gradients, as slots have them, that the plan of another micro-batch of the
            same training has below between iterations: they had better be there in this one too.
    """

    device_budget_bytes: int
    method: str = "auto"
    slots: int = 500
    device: str = ""
    device_fingerprint: str = ""
    time_limit_s: float = 0.0
    seed: int = 0
    below: Below | None = None
    away: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_method(self.method)

    @property
    def recomputes_only(self) -> bool:
        """Plans that use the tier below do not count."""
        return self.method != "auto" and not self.offloads_only

    @property
    def polishes(self) -> bool:
        """Whether what still fits is kept instead of made again."""
        return self.method not in ("rotor", *FIXED)

    def takes(self, formulation: str) -> bool:
        """Whether schedules of blocks that a formulation found are options."""
        if self.method == "rotor":
            return formulation == "keep_all"
        if self.method == "tw_remat":
            return formulation == "tw_remat"
        return self.method != "h_ilp" or formulation not in ("selective", "tw_remat")

    @property
    def offloads_only(self) -> bool:
        """Plans that keep everything in the device do not count."""
        return self.method.startswith("offmate")
