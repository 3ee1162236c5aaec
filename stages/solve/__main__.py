"""Plans the iteration from the options of its blocks, into artifacts/solve: `python -m stowage.stages.solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from stowage.stages.freezing.choice import freezable_of
from stowage.stages.freezing.copies import nodes_with_copies
from stowage.stages.ir.collectives import ranks_of
from stowage.stages.ir.command import ARTIFACTS, DEVICE, run_stage
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.curve import CurvePoint
from stowage.stages.ir.defaults import CUT_SECONDS, O_ILP_SEARCHES
from stowage.stages.ir.errors import MIB, size_text
from stowage.stages.ir.freezable import Freezable, FreezeChoice
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.lossy import ERRORS, GradientError
from stowage.stages.ir.plan import Option, PlanRow, Slot
from stowage.stages.ir.table import read_record, read_rows, write_record, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.rewrite import needed_variant, rewritten
from stowage.stages.settings import load_settings
from stowage.stages.settings.budgets import check_budget
from stowage.stages.settings.sizes import resolve_budget
from stowage.stages.solve import (
    AutoBudget,
    Known,
    PlanRequest,
    Reserve,
    Solved,
    Sought,
    Variant,
    auto_budget,
    eager_peak_bytes,
    free_on_gpu,
    free_ram,
    solve_variants,
    sought_budget,
)
from stowage.stages.solve.curve import point_of, spread_points
from stowage.stages.solve.cuts.frozen_bound import frozen_bound
from stowage.stages.solve.frozen_ways import solve_frozen_ways
from stowage.stages.solve.goals import Solve, kept_of, least
from stowage.stages.solve.parameters import configured_lower_tier, o_ilp_limits
from stowage.stages.solver.outcome import SolverSettings

PROCESS_BYTES = 512 * MIB
"""RAM of the training process besides its tensors: the interpreter and its libraries."""


def budget_of(
    asked: str | int,
    target: DeviceDescription,
    eager_peak_bytes: int,
    solve: Solve,
    recorded: Variant,
    quick: Solve | None = None,
    freezable: Freezable | None = None,
) -> Sought | AutoBudget:
    """Return the bytes of `solve.device_budget`, and how they were found; for `quick` see `least`."""
    kind = check_budget(asked, "solve.device_budget")
    if kind == "auto":
        if target.type == "cuda":
            return auto_budget(free_on_gpu(target.name))
        return auto_budget(free_ram(), extra_bytes=PROCESS_BYTES)
    if kind in ("smallest", "slowdown"):
        return sought_budget(asked, solve, kept_of(recorded, _reserve(target, recorded), freezable), quick)
    return Sought(resolve_budget(asked, eager_peak_bytes), "")


def curve_of(points: int, target: DeviceDescription, solve: Solve, recorded: Variant) -> list[CurvePoint]:
    """Return step time against budget.

    It is empty where a lower tier is used: such plans take too long to make so many of them.
    """
    if not points:
        return []
    reserve = _reserve(target, recorded)
    kept, smallest = kept_of(recorded, reserve), least(solve)

    def point(nbytes: int) -> CurvePoint:
        return point_of(nbytes, solve, kept, reserve)

    return spread_points(points, smallest, max(kept.nbytes, smallest), point)


def _reserve(target: DeviceDescription, recorded: Variant) -> Callable[[int], int]:
    storages = len(recorded.trace.storages)
    return lambda nbytes: target.reserve_bytes(nbytes, storages)


def main() -> None:
    """Solve within the budget; nothing is written unless the referee accepts the plan."""
    settings = load_settings()
    trace = TraceTables.load(ARTIFACTS / "trace")
    nodes = read_rows(ARTIFACTS / "partition" / "nodes.parquet", ComputeNode)
    blocks = read_rows(ARTIFACTS / "partition" / "blocks.parquet", Block)
    variants = [
        Variant(
            name,
            rewritten(trace, name),
            [n for n in nodes if n.variant == name],
            [b for b in blocks if b.variant == name],
        )
        for name in dict.fromkeys(b.variant for b in blocks)
    ]
    target = read_record(DEVICE, DeviceDescription).among(ranks_of(trace.calls))
    wanted = settings.solve
    lower_tier = configured_lower_tier(target, wanted)
    eager = eager_peak_bytes(trace, variants[0].nodes)
    request = PlanRequest(
        device_budget_bytes=1,
        method=wanted.method,
        slots=wanted.memory_slots,
        device=target.name,
        device_fingerprint=target.fingerprint,
        options_limits=SolverSettings(time_limit_s=settings.options.time_limit_s, seed=settings.options.seed),
        o_ilp_limits=o_ilp_limits(settings),
        lower_tier=lower_tier,
        lossy=settings.lossy.leave is not None,
        errors=read_rows(ARTIFACTS / "trace" / ERRORS, GradientError) if settings.lossy.leave is not None else (),
    )
    if settings.lossy.leave is not None:
        request = replace(request, max_gradient_error=settings.lossy.leave.max_gradient_error)
    options = read_rows(ARTIFACTS / "options" / "options.parquet", Option)
    known = Known()
    choice = wanted.freeze.choice() if wanted.freeze is not None else FreezeChoice()
    freezable = freezable_of(trace, choice)
    if choice.measures:
        variants = [replace(v, nodes=nodes_with_copies(v.trace, v.nodes, relative=choice.relative)) for v in variants]

    @cache
    def solve(budget_bytes: int, said: str = "", searches: int = O_ILP_SEARCHES, cut_seconds: float = 0.0) -> Solved:
        reserve = Reserve(target, budget_bytes, trace, said)

        def whole(nbytes: int, rewrite: str = "") -> Solved:
            seconds = cut_seconds if freezable is None else 0.0
            asked = replace(
                request,
                device_budget_bytes=nbytes,
                o_ilp_searches=searches,
                cut_seconds=seconds,
                rewrite=rewrite,
            )
            return solve_variants(variants, options, asked, known)

        with reserve.counted():
            if freezable is None:
                return reserve.stated(whole(reserve.usable_bytes))
            found = solve_frozen_ways(whole, variants, freezable, reserve.usable_bytes, lower_tier)
            guide, offloads = needed_variant(variants, found.summary.variant), lower_tier is not None
            return reserve.stated(frozen_bound(found, guide, variants, freezable, cut_seconds, offloads=offloads))

    def quick(budget_bytes: int) -> Solved:
        return solve(budget_bytes, searches=0)

    by_rules = quick if lower_tier is not None else None
    budget = budget_of(wanted.device_budget, target, eager, solve, variants[0], by_rules, freezable)
    solved = solve(budget.nbytes, budget.said, cut_seconds=CUT_SECONDS)
    write_rows(ARTIFACTS / "solve" / "plan.parquet", PlanRow, solved.rows)
    write_rows(ARTIFACTS / "solve" / "slots.parquet", Slot, solved.slots)
    write_rows(
        ARTIFACTS / "solve" / "curve.parquet",
        CurvePoint,
        curve_of(0 if lower_tier is not None or choice.policy else wanted.curve_points, target, solve, variants[0]),
    )
    write_record(ARTIFACTS / "solve" / "freezing.json", choice)
    write_record(ARTIFACTS / "solve" / "summary.json", solved.summary)
    s = solved.summary
    if s.budget_found:
        print(f"solve: the device budget of {size_text(budget.nbytes)} is {s.budget_found}")
    print(
        f"solve: {s.method} on the {s.variant} trace, predicted peak {size_text(s.device_peak_bytes)} of "
        f"{size_text(s.device_budget_bytes)} "
        f"({s.device_peak_bytes / eager:.0%} of plain PyTorch's {size_text(eager)}), predicted time "
        f"{s.step_time_s / s.least_s:.3f} × the lower bound"
    )
    if s.lossy:
        print(
            f"solve: keeps in fewer bits {', '.join(s.lossy)}; the gradient changes by {s.gradient_error:.2%} at most"
        )
    if s.units:
        print(
            f"solve: at most {s.active_units} of {s.units} units train in a step; peak and time are of the worst and "
            f"of the mean choice, and with all of them {size_text(s.all_active_bytes)} and {s.all_active_time_s:.3f} s"
        )
    if solved.slots:
        print(
            f"solve: {len(solved.slots)} tensors, {size_text(s.lower_tier_bytes)}, are offloaded; each step "
            f"moves {size_text(s.offload_bytes)} down and {size_text(s.reload_bytes)} up, and waits {s.wait_s:.3f} s"
        )


if __name__ == "__main__":
    run_stage(main)
