"""Choose the plan of the whole iteration within the device budget."""

from stowage.stages.solve.select import Solved, eager_peak_bytes, solve_plan

__all__ = ["Solved", "eager_peak_bytes", "solve_plan"]
