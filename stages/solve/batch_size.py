"""Estimates the batch for which the time per sample is least, from one sample batch (thesis 4.5.3).

| symbol | here | meaning | unit |
|---|---|---|---|
| b | `batch` | samples of a batch, not rounded | – |
| n | `sample` | samples of the batch that was traced and profiled | – |
| σ | `share` | b / n | – |
| T, S, A, O | options of the chain | time, saved bytes, peaks, offloaded bytes: proportional to b | s, bytes |

Sizes at b follow from traces of two batches; what does not change between them is fixed: parameters, their gradients,
optimizer states, casts of weights. Times of forward and backward are proportional to b, as in the thesis; updates take
the same time for every batch.

There are two estimates, and the better one counts:

- With a lower tier: O-ILP with r = 1/b (4.3′ to 4.20′), for a batch of 1.
- Without: the thesis notes that for recomputation alone another batch is another memory limit. RK-Rotor is solved for
  batches over the range, then around the best.

Both are about plans before they are rounded, cleaned and judged. So the callers plan the whole numbers next to b and
compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, RkRotor
from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.ir.block import BlockGraph
from stowage.stages.ir.defaults import O_ILP_GAP, O_ILP_SECONDS
from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.graph import SHARED, Block, ComputeNode
from stowage.stages.ir.plan import Option
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.last_run import with_costs, with_last_run_costs
from stowage.stages.solve.batch_problem import problem_of_one
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.offload.offmate.search import reach_of
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.program.program import shared_storages
from stowage.stages.solver.outcome import SolverSettings

BATCHES_PER_GRID = 12
"""Batches at which RK-Rotor is solved over the whole range, and again around the best of them."""

ESTIMATE_SLOTS = 100
"""Memory slots of RK-Rotor here: b is rounded anyway."""


@dataclass(frozen=True)
class FractionalBatch:
    """The best batch, as one formulation estimates it.

    Attributes:
        batch: b.
        time_per_sample_s: seconds per sample at b.
        formulation: the formulation that made the estimate.
    """

    batch: float
    time_per_sample_s: float
    formulation: Literal["o_ilp", "rk_rotor"]


@dataclass(frozen=True)
class _Amounts:
    """Bytes that are always in memory, and seconds outside the blocks.

    Each has a part that is fixed, and one that is proportional to the batch.
    """

    fixed_bytes: int
    batch_bytes: int
    fixed_s: float
    batch_s: float


def fractional_batch(
    trace: TraceTables,
    nodes: Sequence[ComputeNode],
    blocks: Sequence[Block],
    options: Sequence[Option],
    *,
    growth: Sequence[int],
    sample: int,
    largest: int,
    device_budget_bytes: int,
    method: str = "auto",
    o_ilp_limits: SolverSettings | None = None,
    lower_tier: LowerTier | None = None,
) -> FractionalBatch | None:
    """Estimate the best batch between 1 and `largest`; None where neither estimate finds a plan for one sample.

    Args:
        trace: the trace of a batch of `sample` samples.
        nodes: its compute nodes.
        blocks: its blocks.
        options: options of its blocks.
        growth: for each storage the bytes that are proportional to the batch; see `growth_of`.
        sample: samples of the traced batch.
        largest: samples of the largest batch.
        device_budget_bytes: bytes of the device that an iteration may use.
        method: the method of planning, as `PlanRequest` has it.
        o_ilp_limits: limits of one solve of O-ILP.
        lower_tier: the lower tier, if plans may use one.
    """
    chain = Chain(blocks, nodes, options)
    growing = growing_chain(chain, growth, nodes, options)
    amounts = batch_amounts(trace, nodes, growth)
    found: list[FractionalBatch | None] = []
    if method != "offmate":
        found.append(_by_rotor(chain, growing, amounts, sample, largest, device_budget_bytes))
    if method != "rockmate" and lower_tier is not None:
        limits = o_ilp_limits or SolverSettings(O_ILP_SECONDS, O_ILP_GAP)
        offloader = Offloader(program_of(trace, nodes), chain, lower_tier)
        offmate = ChainProblem(offloader, choices_of(offloader))
        found.append(_by_o_ilp(offmate, chain, growing, amounts, sample, largest, device_budget_bytes, limits))
    return min((f for f in found if f is not None), key=lambda f: f.time_per_sample_s, default=None)


def growth_of(trace: TraceTables, larger: TraceTables) -> list[int]:
    """Return the bytes of each storage that are proportional to the batch; `larger` is of twice as many samples.

    Raises:
        TraceError: the two are not the same computation.
    """
    names = [[(s.role, s.name) for s in t.storages] for t in (trace, larger)]
    if names[0] != names[1] or [c.target for c in trace.calls] != [c.target for c in larger.calls]:
        raise TraceError(
            "The model computes something else for twice as many samples, so that the best batch cannot be estimated: "
            "pass a larger batch as the sample."
        )
    return [after.nbytes - before.nbytes for before, after in zip(trace.storages, larger.storages, strict=True)]


def growing_chain(
    chain: Chain, growth: Sequence[int], nodes: Sequence[ComputeNode], options: Sequence[Option]
) -> list[ChainBlock]:
    """Return the part of the chain that grows with the batch.

    It has the same schedules, costed with only what is proportional to the batch.
    """
    blocks, graphs = [], dict[str, BlockGraph]()
    for b, block in enumerate(chain.blocks):
        graph = chain.graph(b)
        allocations = tuple(
            replace(a, nbytes=growth[s]) for a, s in zip(graph.allocations, block.storages, strict=True)
        )
        rows = tuple(
            replace(row, time_s=0.0, workspace_bytes=0) if nodes[n].phase == "update" else row
            for row, n in zip(graph.nodes, block.nodes, strict=True)
        )
        lean = replace(graph, nodes=rows, allocations=allocations)
        graphs[block.block_hash] = lean
        blocks.append(replace(block, graph=lean.to_json(), resident_bytes=0))
    own = [o for o in options if o.block_hash in graphs]
    own = [with_last_run_costs(with_costs(o, graphs[o.block_hash]), graphs[o.block_hash]) for o in own]
    return Chain(blocks, nodes, own).chain_blocks


def batch_amounts(trace: TraceTables, nodes: Sequence[ComputeNode], growth: Sequence[int]) -> _Amounts:
    """Count what is in memory all the time, and what runs outside the blocks."""
    made = shared_storages(nodes)
    resident = [s for s in trace.storages if s.role != "temporary" or s.storage in made]
    shared = [n for n in nodes if n.block == SHARED]
    return _Amounts(
        fixed_bytes=sum(s.nbytes - growth[s.storage] for s in resident),
        batch_bytes=sum(growth[s.storage] for s in resident),
        fixed_s=sum(n.time_s for n in shared if n.phase == "update"),
        batch_s=sum(n.time_s for n in shared if n.phase != "update"),
    )


# RK-Rotor.


def _by_rotor(
    chain: Chain, growing: Sequence[ChainBlock], amounts: _Amounts, sample: int, largest: int, budget_bytes: int
) -> FractionalBatch | None:
    whole = chain.chain_blocks

    def per_sample_s(batch: float) -> float:
        share = batch / sample
        room = budget_bytes - amounts.fixed_bytes - share * amounts.batch_bytes
        if room <= 0:
            return math.inf
        blocks = [at_share(w, part, share) for w, part in zip(whole, growing, strict=True)]
        table = RkRotor(blocks, ESTIMATE_SLOTS, max(1, math.ceil(room / ESTIMATE_SLOTS)))
        return (table.time_s(ESTIMATE_SLOTS) + amounts.fixed_s + share * amounts.batch_s) / batch

    batch, time_s = least_over(per_sample_s, 1.0, float(largest))
    return None if math.isinf(time_s) else FractionalBatch(batch, time_s, "rk_rotor")


def least_over(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return (x, value) of the least value that a search finds.

    It looks at a geometric grid of `BATCHES_PER_GRID` points, then at one between the neighbours of the best of them.
    The first of equal values counts.
    """
    found: dict[float, float] = {}
    for _ in range(2):
        points = (
            [low * (high / low) ** (i / (BATCHES_PER_GRID - 1)) for i in range(BATCHES_PER_GRID)]
            if high > low
            else [low]
        )
        found |= {x: function(x) for x in points if x not in found}
        known = sorted(found)
        best = min(known, key=lambda x: (found[x], x))
        at = known.index(best)
        low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
    return best, found[best]


def at_share(whole: ChainBlock, growing: ChainBlock, share: float) -> ChainBlock:
    """Return a block of the chain for `share` times the samples; `growing` is the part of `whole` that grows."""

    def nbytes(total: int, part: int) -> int:
        return total + math.ceil((share - 1) * part)

    def seconds(total: float, part: float) -> float:
        return total if math.isinf(total) else total + (share - 1) * part

    def options(wholes: Sequence[ChainOption], leans: Sequence[ChainOption]) -> list[ChainOption]:
        return [
            ChainOption(
                time_s=seconds(w.time_s, p.time_s),
                save_bytes=nbytes(w.save_bytes, p.save_bytes),
                forward_peak_bytes=nbytes(w.forward_peak_bytes, p.forward_peak_bytes),
                backward_peak_bytes=nbytes(w.backward_peak_bytes, p.backward_peak_bytes),
            )
            for w, p in zip(wholes, leans, strict=True)
        ]

    return ChainBlock(
        input_bytes=nbytes(whole.input_bytes, growing.input_bytes),
        gradient_bytes=nbytes(whole.gradient_bytes, growing.gradient_bytes),
        resident_bytes=whole.resident_bytes,
        options=options(whole.options, growing.options),
        last_run_options=options(whole.last_run_options, growing.last_run_options),
        fast_time_s=seconds(whole.fast_time_s, growing.fast_time_s),
        fast_peak_bytes=nbytes(whole.fast_peak_bytes, growing.fast_peak_bytes),
    )


# O-ILP.


def _by_o_ilp(
    offmate: ChainProblem,
    chain: Chain,
    growing: Sequence[ChainBlock],
    amounts: _Amounts,
    sample: int,
    largest: int,
    budget_bytes: int,
    settings: SolverSettings,
) -> FractionalBatch | None:
    problem = problem_of_one(offmate.within(budget_bytes), offmate, chain, growing, amounts.batch_bytes, sample)
    limits = OIlpLimits(batch=(1.0, float(largest)), reach=reach_of(problem.steps))
    solution = o_ilp(problem, settings, limits=limits).solution
    if solution is None:
        return None
    return FractionalBatch(solution.batch, solution.objective_s + amounts.batch_s / sample, "o_ilp")
