"""Makes steps in which some blocks are rewritten and the others are as they were recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
    blocks = _SitesByBlock(plain)
    sites: dict[str, list[int]] = {}
    for block, position in enumerate(taken):
        for name, own in blocks.of(ways[position])[block].items():
            sites.setdefault(name, []).extend(own)
    sites = {name: sites[name] for name in REWRITES if name in sites}
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
    blocks = _SitesByBlock(plain)
    try:
        asked = blocks.of_name(name)
    except (KeyError, IndexError):
        return None
    ways = [plain, *(v for v in variants if v is not plain and VariantName.of(v.name).chain == wanted.chain)]
    made = [blocks.of(way) for way in ways]
    taken: list[int] = []
    for block in range(len(plain.blocks)):
        way = next((i for i, own in enumerate(made) if own[block] == asked[block]), None)
        if way is None:
            return None
        taken.append(way)
    found = mixed(ways, taken)
    return found if found is not None and found.name == name else None


class _SitesByBlock:
    """Finds the sites of variants in the blocks of a trace as it was recorded."""

    def __init__(self, plain: Way) -> None:
        self._plain = plain
        self._block_of = {c: n.block for n in plain.nodes for c in n.calls}

    def of(self, way: Way) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Return for each block the rewrites of a variant that change it, with their sites there."""
        return self._plain.once(("sites", way.name), lambda: self.of_name(way.name))

    def of_name(self, name: str) -> list[dict[str, tuple[int, ...]]]:
        """Return for each block the rewrites that a name has in it, with their sites.

        Raises:
            KeyError: there is no such rewrite.
            IndexError: a rewrite has no such site, or a site is in no block.
        """
        found: list[dict[str, tuple[int, ...]]] = [{} for _ in self._plain.blocks]
        for rewrite, sites in VariantName.of(name).parts:
            if rewrite == PLAIN and sites is None:
                continue
            made = REWRITES[rewrite]
            placed = self._plain.once(("placed", rewrite), partial(made.placed, self._plain.trace))
            for site in range(len(placed)) if sites is None else sites:
                block = self._block_of.get(placed[site][1], -1)
                if block >= 0:
                    found[block][rewrite] = (*found[block].get(rewrite, ()), site)
                elif sites is not None:
                    raise IndexError
        return found


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
