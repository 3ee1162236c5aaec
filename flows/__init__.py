"""What people run: `fit` in a script; `plan`, `train`, `benchmark` and `compare` from a shell or as deployments."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.flows._fit import TrainingStep, fit

__all__ = ["TrainingStep", "fit"]


def __getattr__(name: str) -> Any:
    """Import torch only when `fit` is asked for: flows that only orchestrate start faster."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("stowage.flows._fit"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
