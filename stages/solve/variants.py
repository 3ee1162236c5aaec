"""Plans every rewrite of the trace, and mixtures of them, and keeps the fastest plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stowage.stages.ir.errors import Infeasible, NoRoomInLowerTier, size_text, size_texts
from stowage.stages.ir.hierarchy import BlockCluster
from stowage.stages.ir.plan import Option, PlanSummary
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite import Way, is_asked, is_exact, is_for_freezing
from stowage.stages.rewrite.lossy import described, effects
from stowage.stages.solve.collection import rarely_collected
from stowage.stages.solve.cuts.proven import PROVEN, Planned, proven
from stowage.stages.solve.cuts.statement import Bound, with_bound
from stowage.stages.solve.known import Known
from stowage.stages.solve.mixtures import mixtures
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.request import EXACT, TOGETHER, PlanRequest
from stowage.stages.solve.select import solve_plan
from stowage.stages.solve.summary import Solved, lower_bound_s, suffices

ROOM_FOR_COPIES = 2
"""The lower tier is taken to hold everything if it has so many times the bytes of all tensors: files are padded."""


NOISE = 0.02
"""The share of a step's time by which times vary from one measurement to another."""


@dataclass(frozen=True)
class Variant(Way):
    """One way to compute the step: its trace, compute nodes and blocks, and clusters of large blocks."""

    clusters: Sequence[BlockCluster] = ()


def solve_variants(
    variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, known: Known | None = None
) -> Solved:
    """Return the fastest plan among all variants.

    The first variant, the trace as recorded, wins ties and states the bounds.

    Args:
        variants: the trace as recorded and its rewrites.
        options: the options of all their blocks.
        request: what is asked for.
        known: what plans of the same variants, options and method within other budgets have found.

    Raises:
        Infeasible: no variant fits; the one that needs least is reported.
        NoRoomInLowerTier: one would, with more room in the lower tier.
        TableError: options are missing.
    """
    with rarely_collected():
        return _solved(variants, options, request, known or Known())


def _solved(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, known: Known) -> Solved:
    try:
        return _fastest(variants, options, request, known)
    except Infeasible as failure:
        lower_tier = request.lower_tier
        if lower_tier is None or _holds_everything(lower_tier, variants):
            raise
        try:
            boundless = replace(request, lower_tier=lower_tier.boundless())
            needed = _fastest(variants, options, boundless, Known()).summary
        except Infeasible:
            raise failure from None
        text = _room_text(request.device_budget_bytes, needed, lower_tier)
        raise NoRoomInLowerTier(text, failure.smallest_feasible_bytes, needed.lower_tier_bytes) from None


def _holds_everything(lower_tier: LowerTier, variants: Sequence[Variant]) -> bool:
    """Say whether the lower tier has room for every tensor of the step at once, so that more room helps no plan."""
    largest = max(sum(s.nbytes for s in v.trace.storages) for v in variants)
    return lower_tier.capacity_bytes >= ROOM_FOR_COPIES * largest


def _room_text(budget_bytes: int, needed: PlanSummary, lower_tier: LowerTier) -> str:
    """Say that the lower tier is too small, and not the device's budget."""
    room, wanted = lower_tier.capacity_bytes, needed.lower_tier_bytes
    if lower_tier.disk is not None:
        room += lower_tier.disk.capacity_bytes
    on_disk = lower_tier.placement == "disk"
    place = (
        "the offload folder's disk" if on_disk else "the host" if lower_tier.disk is None else "the host and the disk"
    )
    have, want = size_texts(room, wanted)
    ways = "free some there, raise `disk_budget`, or name a folder on another disk in `offload_dir`"
    if not on_disk:
        ways = "raise `host_budget`" + (f", {ways}" if lower_tier.disk is not None else ", or give `offload_dir`")
    return (
        f"The device budget of {size_text(budget_bytes)} can be met by moving {want} to {place}, which has room for "
        f"{have}: {ways}."
    )


def _fastest(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, known: Known) -> Solved:
    """Return the preferred of the plans with leave and of those without: the latter are what is planned without leave.

    Mixtures, and schedules that cuts find, are looked for among all ways at once, so that with leave they may all be
    lossy, and the fastest exact plan none of them.
    """
    if not request.lossy or request.rewrite or len({is_asked(v.name) for v in variants}) < 2:
        return _planned(variants, options, request, known)
    found: list[Solved] = []
    failures: list[Infeasible] = []
    for asked in (replace(request, rewrite=EXACT), request):
        try:
            found.append(_planned(variants, options, asked, known))
        except Infeasible as failure:
            failures.append(failure)
    if not found:
        raise min(failures, key=lambda failure: failure.smallest_feasible_bytes)
    smallest = [s.summary.smallest_feasible_bytes for s in found] + [f.smallest_feasible_bytes for f in failures]
    best = within_bound(preferred(found), found)
    return replace(best, summary=replace(best.summary, smallest_feasible_bytes=min(smallest)))


def _planned(variants: Sequence[Variant], options: Sequence[Option], request: PlanRequest, known: Known) -> Solved:
    found: list[Solved] = []
    failures: list[Infeasible] = []
    tried: list[Planned] = []
    bound_s = lower_bound_s(variants[0].nodes, request.lower_tier)
    ways = [v for v in variants if _is_of(v, request.rewrite)]
    request = replace(request, ways=len(ways))

    def plan(way: Way, request: PlanRequest = request) -> Solved:
        hashes = {b.block_hash for b in way.blocks}
        own = [o for o in options if o.block_hash in hashes]
        solved = solve_plan(way.trace, way.nodes, way.blocks, own, request, known.part(way.name), bound_s=bound_s)
        return replace(solved, summary=replace(solved.summary, variant=way.name, exact=is_exact(way.name)))

    def allowed(way: Way) -> bool:
        """Say whether a way is within the limit: a class counts whole in a mixture that packs it in some blocks."""
        if is_exact(way.name):
            return True
        return request.lossy and described(variants[0].trace, way.name, request.errors)[1] <= request.max_gradient_error

    for variant in filter(allowed, ways):
        if not is_asked(variant.name) and any(suffices(s, request.enough) for s in found):
            continue
        try:
            found.append(plan(variant))
        except Infeasible as failure:
            failures.append(failure)
            tried.append(Planned(variant, None))
            continue
        tried.append(Planned(variant, found[-1]))
        if not _leaves_to_be_desired(found[-1]) and not is_asked(variant.name):
            break
    if not found:
        raise min(failures, key=lambda f: f.smallest_feasible_bytes)
    smallest = min([s.summary.smallest_feasible_bytes for s in found] + [f.smallest_feasible_bytes for f in failures])
    wanted = not any(suffices(s, request.enough) for s in found)
    if wanted and all((_leaves_to_be_desired(s) or is_asked(s.summary.variant)) and not s.slots for s in found):
        for way in mixtures(ways, options, request, known.part("mixtures")):
            if not allowed(way):
                continue
            with suppress(Infeasible):  # rounding to slots can promise what the referee does not find
                # Mixtures differ in blocks, of which eviction knows nothing: it has tried the whole rewrites.
                found.append(plan(way, replace(request, eviction_rules=0, is_mixture=True)))
                tried.append(Planned(way, found[-1], mixture=True))
    untried = [v for v in ways if (request.lossy or is_exact(v.name)) and all(t.way is not v for t in tried)]
    found = proven(tried, untried, request, allowed)
    best = preferred(found)
    lossy, error = described(variants[0].trace, best.summary.variant, request.errors)
    words = effects(variants[0].trace, best.summary.variant, request.errors)
    summary = replace(best.summary, smallest_feasible_bytes=smallest, lossy=lossy, lossy_effects=words)
    return replace(best, summary=replace(summary, gradient_error=error))


def _is_of(way: Way, rewrite: str) -> bool:
    """Say whether a way is of a rewrite, or, where none is named, of use where everything trains."""
    if rewrite == EXACT:
        return not is_asked(way.name)
    rewrite = "" if rewrite == TOGETHER else rewrite
    return VariantName.of(way.name).rewrite == rewrite if rewrite else not is_for_freezing(way.name)


def preferred(found: Sequence[Solved]) -> Solved:
    """Return the fastest plan; a lossy one only if it is faster than exact ones by more than measured times vary."""
    best = min(found, key=lambda s: s.summary.step_time_s)
    exact = min((s for s in found if s.summary.exact), key=lambda s: s.summary.step_time_s, default=best)
    return best if best.summary.step_time_s < (1 - NOISE) * exact.summary.step_time_s else exact


def within_bound(plan: Solved, plans: Sequence[Solved]) -> Solved:
    """Return the plan with the least bound that any of some plans states: no schedule of any beats that."""
    bounded = [s.summary for s in plans if s.summary.bound_s]
    if not bounded or len(bounded) < len(plans):
        return plan
    least = min(bounded, key=lambda summary: summary.bound_s)
    if least.bound_s >= plan.summary.bound_s:
        return plan
    bound = Bound(least.bound_s, least.bound_kind, least.bound_cuts, least.bound_variant)
    return with_bound(plan, bound, PROVEN)


def _leaves_to_be_desired(solved: Solved) -> bool:
    """Say whether another variant could be faster: something is computed again, or offloaded."""
    return solved.summary.recomputed_bytes > 0 or bool(solved.slots)
