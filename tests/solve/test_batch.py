"""The estimate of the best batch: what grows with it, what O-ILP is asked, and what comes out."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
import torch

from stowage.stages.formulations.offload.o_ilp.model import OIlpLimits
from stowage.stages.formulations.offload.o_ilp.solve import o_ilp
from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.machine import Link
from stowage.stages.solve import FractionalBatch, LowerTier, fractional_batch
from stowage.stages.solve.batch_problem import problem_of_one
from stowage.stages.solve.batch_size import (
    at_share,
    batch_amounts,
    growing_chain,
    growth_of,
    least_over,
)
from stowage.stages.solve.offload.offloader import Offloader
from stowage.stages.solve.offload.offmate.choices import choices_of
from stowage.stages.solve.offload.offmate.problem import ChainProblem
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solver.outcome import SolverSettings
from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_model
from stowage.stages.workload.samples import sample_batch
from tests.solve.prepared import Prepared, prepare_trace
from tests.zoo import GPT2, LLAMA

SAMPLE = 2
SHAPES = {"gpt2": GPT2, "llama": LLAMA}
LOWER_TIER = LowerTier(Link(1e9, 1e9, 1.5e9), capacity_bytes=1 << 40, smallest_bytes=1024)
SETTINGS = SolverSettings(time_limit_s=20.0, gap=1e-4)


@cache
def prepared(architecture: str, samples: int) -> Prepared:
    """A small model with AdamW and a batch of some size; its weights are those of every size."""
    model = build_model(architecture, SHAPES[architecture], seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    return prepare_trace(trace_step(model, sample_batch(model, samples, 12, 1), optimizer=optimizer))


def chain_of(tables: Prepared) -> Chain:
    return Chain(tables.blocks, tables.nodes, tables.options)


@cache
def growth(architecture: str) -> list[int]:
    return growth_of(prepared(architecture, SAMPLE).trace, prepared(architecture, 2 * SAMPLE).trace)


@pytest.mark.parametrize("architecture", list(SHAPES))
def test_sizes_at_a_third_batch_follow_from_two(architecture: str) -> None:
    trace, third = prepared(architecture, SAMPLE).trace, prepared(architecture, 5 * SAMPLE).trace
    added = growth(architecture)
    for before, after, more in zip(trace.storages, third.storages, added, strict=True):
        assert after.nbytes == before.nbytes + 4 * more
    fixed = {s.storage for s in trace.storages if s.role in ("parameter", "state", "buffer")}
    fixed |= {trace.values[g.gradient_value].storage for g in trace.gradients}
    assert not any(added[s] for s in fixed)
    activations = sum(s.nbytes for s in trace.storages if s.role == "temporary" and s.storage not in fixed)
    assert sum(added) > 0.9 * activations


def test_another_computation_for_another_batch_is_refused() -> None:
    with pytest.raises(TraceError, match="pass a larger batch"):
        growth_of(prepared("gpt2", SAMPLE).trace, prepared("llama", SAMPLE).trace)


@pytest.mark.parametrize("architecture", list(SHAPES))
def test_a_block_at_twice_the_share_is_the_block_of_twice_the_batch(architecture: str) -> None:
    one, two = prepared(architecture, SAMPLE), prepared(architecture, 2 * SAMPLE)
    chain = chain_of(one)
    lean = growing_chain(chain, growth(architecture), one.nodes, one.options)
    assert len(chain.blocks) == len(two.blocks) > 3
    for whole, part, larger in zip(chain.chain_blocks, lean, chain_of(two).chain_blocks, strict=True):
        assert at_share(whole, part, 1.0) == whole
        doubled = at_share(whole, part, 2.0)
        assert doubled.input_bytes == larger.input_bytes
        assert doubled.gradient_bytes == larger.gradient_bytes
        assert doubled.resident_bytes == larger.resident_bytes
        # The option that keeps everything is one of both.
        keep, keep_larger = (max(o.save_bytes for o in b.options) for b in (doubled, larger))
        assert keep == pytest.approx(keep_larger, abs=16)


def test_amounts_are_all_that_is_always_in_memory() -> None:
    tables = prepared("gpt2", SAMPLE)
    amounts = batch_amounts(tables.trace, tables.nodes, growth("gpt2"))
    inputs = sum(s.nbytes for s in tables.trace.storages if s.role == "input")
    persistent = sum(s.nbytes for s in tables.trace.storages if s.role != "temporary")
    assert amounts.batch_bytes >= inputs > 0
    assert amounts.fixed_bytes + amounts.batch_bytes >= persistent
    assert amounts.fixed_bytes >= persistent - inputs


def offmate_of(tables: Prepared) -> ChainProblem:
    offloader = Offloader(program_of(tables.trace, tables.nodes), chain_of(tables), LOWER_TIER)
    return ChainProblem(offloader, choices_of(offloader))


def test_o_ilp_for_one_sample_is_o_ilp_for_the_batch_divided_by_it() -> None:
    """With the batch held at the sample's size, r = 1/n, time per sample is that of the ordinary problem over n."""
    tables = prepared("gpt2", SAMPLE)
    offmate, chain = offmate_of(tables), chain_of(tables)
    lean = growing_chain(chain, growth("gpt2"), tables.nodes, tables.options)
    batch_bytes = batch_amounts(tables.trace, tables.nodes, growth("gpt2")).batch_bytes
    budget = sum(s.nbytes for s in tables.trace.storages if s.role != "temporary")
    ordinary = offmate.within(budget)
    one = problem_of_one(ordinary, offmate, chain, lean, batch_bytes, SAMPLE)
    held = o_ilp(one, SETTINGS, limits=OIlpLimits(batch=(SAMPLE, SAMPLE))).solution
    whole = o_ilp(ordinary, SETTINGS).solution
    assert held is not None
    assert whole is not None
    assert held.objective_s * SAMPLE == pytest.approx(whole.objective_s, rel=1e-3)
    assert held.batch == pytest.approx(SAMPLE)


def test_every_update_is_paid_once_whatever_the_batch() -> None:
    tables = prepared("gpt2", SAMPLE)
    offmate, chain = offmate_of(tables), chain_of(tables)
    lean = growing_chain(chain, growth("gpt2"), tables.nodes, tables.options)
    one = problem_of_one(offmate.within(1 << 40), offmate, chain, lean, 0, SAMPLE)
    paid = sum(g.device_update_s + g.pinned_update_s for g in one.groups)
    assert paid == pytest.approx(sum(n.time_s for n in tables.nodes if n.phase == "update"))
    for block, nodes in zip(one.blocks, tables.blocks, strict=True):
        computed = sum(tables.nodes[n].time_s for n in nodes.nodes if tables.nodes[n].phase != "update")
        fastest = min(o.forward_time_s + o.backward_time_s for o in block.options)
        assert fastest * SAMPLE == pytest.approx(computed)


def estimate(tables: Prepared, budget: int, method: str, largest: int = 32) -> FractionalBatch | None:
    return fractional_batch(
        tables.trace,
        tables.nodes,
        tables.blocks,
        tables.options,
        growth=growth("gpt2"),
        sample=SAMPLE,
        largest=largest,
        device_budget_bytes=budget,
        method=method,
        lower_tier=LOWER_TIER,
    )


@pytest.mark.parametrize("method", ["rockmate", "offmate"])
def test_more_memory_is_never_slower_and_one_byte_is_too_little(method: str) -> None:
    tables = prepared("gpt2", SAMPLE)
    keep_all = tables.solve().summary.device_peak_bytes
    times = []
    for share in (0.7, 1.0, 1.5, 3.0):
        found = estimate(tables, int(share * keep_all), method)
        if found is not None:
            assert 1 <= found.batch <= 32 + 1e-6
            assert found.formulation == ("rk_rotor" if method == "rockmate" else "o_ilp")
            times.append(found.time_per_sample_s)
    assert len(times) >= 3
    # O-ILP stops at a gap of 1%; RK-Rotor is looked at on a grid.
    assert all(b <= a * 1.02 for a, b in pairwise(times))
    assert estimate(tables, 1, method) is None


def test_with_endless_memory_the_largest_batch_is_the_best() -> None:
    """Updates are paid once a batch, everything else by the sample: time per sample is a + u / b."""
    tables = prepared("gpt2", SAMPLE)
    updates = sum(n.time_s for n in tables.nodes if n.phase == "update")
    others = sum(n.time_s for n in tables.nodes) - updates
    found = estimate(tables, 1 << 50, "rockmate", largest=16)
    assert found is not None
    assert found.batch == pytest.approx(16)
    assert found.time_per_sample_s == pytest.approx(others / SAMPLE + updates / 16)


def test_the_better_of_both_estimates_counts() -> None:
    tables = prepared("gpt2", SAMPLE)
    budget = tables.solve().summary.device_peak_bytes
    both = [estimate(tables, budget, m) for m in ("rockmate", "offmate", "auto")]
    times = [math.inf if e is None else e.time_per_sample_s for e in both]
    assert times[2] == min(times[:2])


def test_the_least_of_a_function_is_found_on_two_grids() -> None:
    x, value = least_over(lambda x: (x - 7) ** 2 + 3, 1.0, 64.0)
    assert x == pytest.approx(7, abs=0.5)
    assert value == pytest.approx(3, abs=0.3)
    assert least_over(lambda x: -x, 1.0, 64.0) == (64.0, -64.0)
    assert least_over(lambda x: x, 1.0, 64.0) == (1.0, 1.0)
    assert least_over(lambda x: x if x <= 3 else math.inf, 2.0, 2.0) == (2.0, 2.0)
    assert math.isinf(least_over(lambda x: math.inf, 1.0, 8.0)[1])
