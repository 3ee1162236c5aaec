"""Makes the trace in which some blocks are rewritten and the others are as they were recorded, and names it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.rewrite.ways.identity import Names
from stowage.stages.rewrite.ways.splice import Rewriting, Way, spliced

_PART = re.compile(r"(?P<rewrite>[a-z_]+)\[(?P<blocks>\d+(-\d+)?(,\d+(-\d+)?)*)\]")


def mixed(ways: Sequence[Way], taken: Sequence[int], rewrites: Mapping[str, Rewriting]) -> Way | None:
    """The step in which each block is computed in the way that is taken for it.

    Args:
        ways: the trace as it was recorded first, then as each rewrite has it, all cut into the same blocks.
        taken: of each block, the position of its way.
        rewrites: by the names of the ways.

    Returns:
        the mixed step; None where it cannot be put together from the ways.
    """
    plain = ways[0]
    trace = plain.trace
    for position, way in enumerate(ways[1:], 1):
        blocks = {b for b, chosen in enumerate(taken) if chosen == position}
        if blocks:
            trace = _rewritten(trace, plain, blocks, rewrites[way.name])
    found = spliced(trace, ways, taken)
    if found is None:
        return None
    return Way(name_of([w.name for w in ways], taken), trace, *found)


def _rewritten(trace: TraceTables, plain: Way, blocks: set[int], rewrite: Rewriting) -> TraceTables:
    names = Names(trace)
    inside = {plain.names.call[c] for n in plain.nodes if n.block in blocks for c in n.calls}

    def where(call: Call) -> bool:
        return names.call[call.call] in inside

    return rewrite(trace, where)


def name_of(names: Sequence[str], taken: Sequence[int]) -> str:
    """The name of a mixed step, which says what is taken where: `packed[0-3,7]`."""
    parts = []
    for position, name in enumerate(names[1:], 1):
        blocks = [b for b, chosen in enumerate(taken) if chosen == position]
        if blocks:
            parts.append(f"{name}[{_ranges(blocks)}]")
    return "+".join(parts) or names[0]


def _ranges(blocks: Sequence[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        found = [b for _, b in run]
        runs.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(runs)


def taken_of(name: str, names: Sequence[str], blocks: int) -> list[int]:
    """The inverse of `name_of`, for a chain of so many blocks.

    Raises:
        TableError: it names a rewrite or a block that there is not.
    """
    taken = [0] * blocks
    for part in name.split("+"):
        found = _PART.fullmatch(part)
        if found is None or found["rewrite"] not in names[1:]:
            raise TableError(f"There is no rewrite {part!a} of this step: run the solve stage (`dvc repro`).")
        for run in found["blocks"].split(","):
            first, _, last = run.partition("-")
            for block in range(int(first), int(last or first) + 1):
                if block >= blocks:
                    raise TableError(f"Rewrite {part!a} is of a longer chain: run the solve stage (`dvc repro`).")
                taken[block] = names.index(found["rewrite"])
    return taken
