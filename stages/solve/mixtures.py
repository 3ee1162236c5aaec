"""Finds steps in which some blocks are rewritten and the others are as they were recorded.

Each block of the chain has the options of every rewrite. RK-Rotor chooses among all of them, and the option that it
takes for a block says in which way the block is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, RkRotor
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.plan import Option
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way, exchangeable, is_exact, mixed
from stowage.stages.solve.known import Known
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.request import PlanRequest

NOMINAL_SHARES = (1.0, 1.15, 1.3)
"""Shares of what activations may take, for each of which the chain is solved.

RK-Rotor rounds sizes up and frees late, so that plans for a larger nominal memory may truly fit.
"""


def mixtures(
    variants: Sequence[Way], options: Sequence[Option], request: PlanRequest, known: Known | None = None
) -> Iterator[Way]:
    """Yield mixed steps that may be faster than any variant alone.

    Args:
        variants: the trace as it was recorded and its rewrites, for each kind of chain.
        options: the options of all their blocks.
        request: what is asked for; nothing is mixed for plans to compare with, and for fixed ones.
        known: what mixtures of the same variants and options for other budgets have found.
    """
    known = known if known is not None else Known()
    method = method_of(request.method)
    if method.compared or method.fixed:
        return
    for first in variants:
        name = VariantName.of(first.name)
        if name.rewrite != PLAIN:
            continue
        others = [v for v in variants if v is not first and VariantName.of(v.name).chain == name.chain]
        ways = [first, *(v for v in others if request.lossy or is_exact(v.name))]
        if len(ways) < 2:
            continue
        own = known.part(tuple(way.name for way in ways))
        chains = own.once("chains", partial(Chains.of, ways, options, request))
        available_bytes = max(request.device_budget_bytes - chains.outside_bytes, 1)
        for taken in choices(chains, available_bytes, request.slots):
            found = own.once(("mixed", taken), partial(mixed, ways, taken))
            if found is not None:
                yield found


@dataclass(frozen=True)
class Chains:
    """Holds the chains of several ways to compute a step, joined to one chain that does not depend on the budget.

    Attributes:
        blocks: the joined chain, whose blocks have the options of every way that they may be computed in; empty where
            no block may be computed in another way.
        way_of: for each block, the position of the way that each of its options belongs to.
        exchanged: the blocks that may be computed in each way but the first.
        outside_bytes: what is in memory throughout the step, whatever is chosen.
    """

    blocks: Sequence[ChainBlock]
    way_of: Sequence[Sequence[int]]
    exchanged: Sequence[set[int]]
    outside_bytes: int

    @staticmethod
    def of(ways: Sequence[Way], options: Sequence[Option], request: PlanRequest) -> Chains:
        """Join the chains.

        Args:
            ways: the trace as it was recorded, then its rewrites.
            options: the options of all their blocks; those that the request does not take are left out.
            request: what is asked for.
        """
        first = ways[0]
        program = program_of(first.trace, first.nodes)
        outside = program.base_bytes + program.uncounted_bytes(s for b in first.blocks for s in b.storages)
        exchanged = [set(exchangeable(first, way)) for way in ways[1:]]
        if not any(exchanged):
            return Chains([], [], exchanged, outside)
        taken = [o for o in options if request.takes(o.formulation)]
        chains = [Chain(w.blocks, w.nodes, [o for o in taken if o.block_hash in _hashes(w)]) for w in ways]
        return Chains(*_joined([c.chain_blocks for c in chains], exchanged), exchanged, outside)


def choices(chains: Chains, available_bytes: int, slots: int) -> Iterator[tuple[int, ...]]:
    """Yield for several nominal sizes of memory which way RK-Rotor takes for each block, where that mixes ways.

    Args:
        chains: the chains of the ways, joined.
        available_bytes: what is left of the budget beside what is always in memory.
        slots: memory slots of RK-Rotor's table.
    """
    blocks, exchanged = chains.blocks, chains.exchanged
    if not blocks:
        return
    nominal_bytes = [max(1, int(available_bytes * share)) for share in NOMINAL_SHARES]
    slot_bytes = -(-nominal_bytes[-1] // slots)
    table = RkRotor(blocks, slots, slot_bytes)
    least = table.smallest_slots()
    if least is None:
        return
    seen: set[tuple[int, ...]] = set()
    for nbytes in nominal_bytes:
        level = min(slots, nbytes // slot_bytes)
        if level < least:
            continue
        taken = [0] * len(blocks)
        for step in table.sequence(level):
            if step.kind == "forward":
                taken[step.block] = chains.way_of[step.block][step.option]
        found = tuple(taken)
        mixes = len({way for block, way in enumerate(found) if any(block in e for e in exchanged)}) > 1
        if mixes and found not in seen:
            seen.add(found)
            yield found


def _hashes(way: Way) -> set[str]:
    return {b.block_hash for b in way.blocks}


def _joined(
    chains: Sequence[Sequence[ChainBlock]], exchanged: Sequence[set[int]]
) -> tuple[list[ChainBlock], list[list[int]]]:
    """Return the chain whose blocks have the options of all their ways, and for each option its way."""
    joined: list[ChainBlock] = []
    way_of: list[list[int]] = []
    for number, block in enumerate(chains[0]):
        options: list[ChainOption] = []
        last_runs: list[ChainOption] = []
        ways: list[int] = []
        for way, chain in enumerate(chains):
            if way and number not in exchanged[way - 1]:
                continue
            options += chain[number].options
            last_runs += chain[number].last_run_options
            ways += [way] * len(chain[number].options)
        joined.append(
            ChainBlock(
                block.input_bytes,
                block.gradient_bytes,
                block.resident_bytes,
                options,
                last_runs,
                block.fast_time_s,
                block.fast_peak_bytes,
            )
        )
        way_of.append(ways)
    return joined, way_of
