"""Chooses the plan of the whole iteration within the device budget.

- `select`: asks every source for plans, and keeps the fastest.
- `proposal`: the interface between sources of plans and the referee.
- `request`: what a plan is asked for.
- `in_memory`, `evicted`, `offload/`: sources of plans, without and with the lower tier.
- `collection`: lets Python look for cyclic garbage less often.
- `collectives/`: gathers and scatters beside computing.
- `program/`: the program that all of them plan.
- `referee`: judges plans and hides their transfers.
- `judged_plans`: keeps the plans that were accepted.
- `summary`: what a plan states about itself.
- `variants`, `mixtures`: plans for each rewrite of the trace, and for steps in which some blocks are rewritten.
- `frozen`: plans for a step that freezes, within the memory of the worst choice of what trains.
- `frozen_ways`: the same with and without codes for what is frozen.
- `at_once`: plans without any search.
- `evaluation`: plans for a forward alone.
- `goals`, `free`, `reserve`: find the budget and what of it a plan may take.
- `binding`: says where the leanest plan reaches its peak.
- `cuts/`: how far plans are from the optimum, and schedules that are closer.
- `curve`: plans within several budgets.
- `time_share`: how long cuts and greedy eviction may take.
- `known`: what plans within several budgets have in common.
- `batch_size`, `batch_problem`: estimate the best batch.
- `parameters`: limits of O-ILP from `params.yaml`.
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
