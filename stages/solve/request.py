"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.ir.errors import ParameterError
from stowage.stages.solve.offload import Below

METHODS = ("auto", "rockmate", "hiremate", "offmate", "offmate_preprint")


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
            best of the plans that offload; `offmate_preprint` the same with three options per block and whole-block
            offload, to compare with.
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
        return self.method in ("rockmate", "hiremate")

    @property
    def offloads_only(self) -> bool:
        """Plans that keep everything in the device do not count."""
        return self.method.startswith("offmate")
