"""Makes steps in which some blocks are rewritten and the others are as they were recorded."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.graph import Block, ComputeNode
from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite.rewrites import REWRITES
from stowage.stages.rewrite.splice import Way, spliced
from stowage.stages.rewrite.variants import rewritten


def mixed(ways: Sequence[Way], taken: Sequence[int]) -> Way | None:
    """Make the step in which each block is computed in the way that is taken for it.

    Args:
        ways: the trace as it was recorded first, then as rewrites have it, all cut into the same blocks.
        taken: position of each block's way.

    Returns:
        The mixed step; None where it cannot be put together from the ways.
    """
    plain = ways[0]
    block_of = {c: n.block for n in plain.nodes for c in n.calls}
    sites: dict[str, list[int]] = {}
    for position, way in enumerate(ways[1:], 1):
        name = VariantName.of(way.name).rewrite
        calls = REWRITES[name].sites(plain.trace)
        chosen = {b for b, way_of_block in enumerate(taken) if way_of_block == position}
        sites[name] = [site for site, call in enumerate(calls) if block_of.get(call) in chosen]
    variant = VariantName.at(sites, VariantName.of(plain.name).chain).text
    trace = rewritten(plain.trace, variant)
    found = spliced(trace, ways, taken)
    return Way(variant, trace, *found) if found is not None else None


def variant_named(variants: Sequence[Way], name: str) -> Way | None:
    """Find a variant by its name, and put it together where it is mixed.

    Args:
        variants: the variants that are not mixed.
        name: the variant in the plan's summary.

    Returns:
        The variant; None where these variants do not make it.
    """
    for variant in variants:
        if variant.name == name:
            return variant
    wanted = VariantName.of(name)
    by_name = {v.name: v for v in variants}
    plain = by_name.get(VariantName(PLAIN, wanted.chain).text)
    if plain is None:
        return None
    block_of = {c: n.block for n in plain.nodes for c in n.calls}
    ways, taken = [plain], [0] * len(plain.blocks)
    for rewrite, sites in wanted.parts:
        way = by_name.get(VariantName(rewrite, wanted.chain).text)
        if way is None or sites is None or rewrite not in REWRITES:
            return None
        calls = REWRITES[rewrite].sites(plain.trace)
        for site in sites:
            block = block_of.get(calls[site], -1) if site < len(calls) else -1
            if block < 0:
                return None
            taken[block] = len(ways)
        ways.append(way)
    found = mixed(ways, taken)
    return found if found is not None and found.name == name else None


def needed_variant(variants: Sequence[Way], name: str) -> Way:
    """Find a variant as `variant_named` does.

    Raises:
        TableError: these variants do not make it.
    """
    found = variant_named(variants, name)
    if found is None:
        raise TableError(f"The tables of this step do not make its variant {name!a}: run `dvc repro`.")
    return found


def stored_variant(trace: TraceTables, nodes: Sequence[ComputeNode], blocks: Sequence[Block], name: str) -> Way:
    """Find a variant among the tables that `partition` wrote, and put it together where it is mixed.

    Args:
        trace: the trace as it was recorded.
        nodes: compute nodes of all variants.
        blocks: blocks of all variants.
        name: the variant in the plan's summary.

    Raises:
        TableError: these tables do not make it.
    """

    def way(variant: str) -> Way:
        own = [n for n in nodes if n.variant == variant], [b for b in blocks if b.variant == variant]
        return Way(variant, rewritten(trace, variant), *own)

    names = dict.fromkeys(b.variant for b in blocks)
    return way(name) if name in names else needed_variant([way(each) for each in names], name)
