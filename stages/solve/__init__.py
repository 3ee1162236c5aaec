"""Choose the plan of the whole iteration within the device budget.

`select.py` hears sources of plans: `in_memory.py`, and those of `offload/`. A source makes proposals (`proposal.py`),
the referee judges them and hides their copies (`referee.py`), `judged_plans.py` keeps them, and `summary.py` says
what the best one states about itself. `program/` is what they all plan. `variants.py` does this for each rewrite of
the trace, `at_once.py` without any search, `evaluation.py` for a forward alone, and `goals.py`, `free.py` and
`reserve.py` say within which budget; `batch_size.py`, with `batch_problem.py`, estimates the best batch.
"""

from stowage.stages.solve.at_once import keep_everything_at_once, same_rows
from stowage.stages.solve.batch_size import FractionalBatch, fractional_batch, growth_of
from stowage.stages.solve.free import AutoBudget, auto_budget, free_on_gpu, free_ram
from stowage.stages.solve.goals import Sought, sought_budget
from stowage.stages.solve.known import Known
from stowage.stages.solve.offload.limits import lower_tier_of
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.of_trace import eager_peak_bytes
from stowage.stages.solve.request import PlanRequest, check_method
from stowage.stages.solve.reserve import Reserve
from stowage.stages.solve.select import solve_plan
from stowage.stages.solve.summary import Solved
from stowage.stages.solve.variants import Variant, solve_variants

__all__ = [
    "AutoBudget",
    "FractionalBatch",
    "Known",
    "LowerTier",
    "PlanRequest",
    "Reserve",
    "Solved",
    "Sought",
    "Variant",
    "auto_budget",
    "check_method",
    "eager_peak_bytes",
    "fractional_batch",
    "free_on_gpu",
    "free_ram",
    "growth_of",
    "keep_everything_at_once",
    "lower_tier_of",
    "same_rows",
    "solve_plan",
    "solve_variants",
    "sought_budget",
]
