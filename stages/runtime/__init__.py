"""What generated code imports."""

from __future__ import annotations

from stowage.stages.runtime.iteration import Iteration
from stowage.stages.runtime.program import Program
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.runtime.updates import PerParameterUpdates

__all__ = ["Iteration", "PerParameterUpdates", "Program", "RandomStates"]
