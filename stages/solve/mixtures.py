"""Finds steps in which some blocks are rewritten and the others are as they were recorded.

Each block of the chain has the options of every rewrite. RK-Rotor chooses among all of them, and the option that it
takes for a block says in which way the block is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stowage.stages.formulations.chain.rk_rotor import ChainBlock, ChainOption, RkRotor
from stowage.stages.ir.methods import method_of
from stowage.stages.ir.plan import Option
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite import Way, exchangeable, is_exact, mixed
from stowage.stages.solve.program.chain import Chain
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.solve.request import PlanRequest

NOMINAL_SHARES = (1.0, 1.15, 1.3)
"""Shares of what activations may take, for each of which the chain is solved.

RK-Rotor rounds sizes up and frees late, so that plans for a larger nominal memory may truly fit.
"""


def mixtures(variants: Sequence[Way], options: Sequence[Option], request: PlanRequest) -> Iterator[Way]:
    """Yield mixed steps that may be faster than any variant alone.

    Args:
        variants: the trace as it was recorded and its rewrites, for each kind of chain.
        options: the options of all their blocks.
        request: what is asked for; nothing is mixed for plans to compare with, and for fixed ones.
    """
    method = method_of(request.method)
    if method.compared or method.fixed:
        return
    taken_options = [o for o in options if request.takes(o.formulation)]
    for first in variants:
        name = VariantName.of(first.name)
        if name.rewrite != PLAIN:
            continue
        others = [v for v in variants if v is not first and VariantName.of(v.name).chain == name.chain]
        ways = [first, *(v for v in others if request.lossy or is_exact(v.name))]
        if len(ways) < 2:
            continue
        program = program_of(first.trace, first.nodes)
        outside = program.base_bytes + program.uncounted_bytes(s for b in first.blocks for s in b.storages)
        available_bytes = max(request.device_budget_bytes - outside, 1)
        for taken in choices(ways, taken_options, available_bytes, request.slots):
            found = mixed(ways, taken)
            if found is not None:
                yield found


def choices(
    ways: Sequence[Way], options: Sequence[Option], available_bytes: int, slots: int
) -> Iterator[tuple[int, ...]]:
    """Yield for several nominal sizes of memory which way RK-Rotor takes for each block, where that mixes ways.

    Args:
        ways: the trace as it was recorded, then its rewrites.
        options: the options of all their blocks.
        available_bytes: what is left of the budget beside what is always in memory.
        slots: memory slots of RK-Rotor's table.
    """
    exchanged = [set(exchangeable(ways[0], way)) for way in ways[1:]]
    if not any(exchanged):
        return
    chains = [Chain(w.blocks, w.nodes, [o for o in options if o.block_hash in _hashes(w)]) for w in ways]
    blocks, way_of = _joined([c.chain_blocks for c in chains], exchanged)
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
                taken[step.block] = way_of[step.block][step.option]
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
        tails: list[ChainOption] = []
        ways: list[int] = []
        for way, chain in enumerate(chains):
            if way and number not in exchanged[way - 1]:
                continue
            options += chain[number].options
            tails += chain[number].last_run_options
            ways += [way] * len(chain[number].options)
        joined.append(
            ChainBlock(
                block.input_bytes,
                block.gradient_bytes,
                block.resident_bytes,
                options,
                tails,
                block.fast_time_s,
                block.fast_peak_bytes,
            )
        )
        way_of.append(ways)
    return joined, way_of
