"""Names of variants: the exact rewrite by which a trace is computed, and the chain of blocks into which it is cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

PLAIN = "plain"
"""The rewrite that changes nothing."""

LONG_LIVED: Literal["long_lived"] = "long_lived"
"""The chain around long-lived values, which it keeps (see `find_chain` in `partition`)."""

NO_LONG_LIVED: Literal[""] = ""
"""The chain that keeps no long-lived values."""

ChainName = Literal["", "long_lived"]

_BETWEEN = "+"
_PART = re.compile(r"(?P<rewrite>\w+)(\[(?P<sites>\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*)\])?")


@dataclass(frozen=True)
class VariantName:
    """The name of a variant, as tables have it.

    rewrite: the name of a rewrite (see `rewrite`), with its sites in brackets where it is made at some alone; several
        rewrites, each at sites of its own, have plus signs between them: `packed[0-3,7]`.
            several are made, at sites of their own, plus signs are between them: `packed[0-3,7]`.
        chain: the kind of chain.
    """

    rewrite: str = PLAIN
    chain: ChainName = NO_LONG_LIVED

    @property
    def text(self) -> str:
        """Return the name as tables have it: `plain`, `packed+long_lived`."""
        return _BETWEEN.join(part for part in (self.rewrite, self.chain) if part)

    @property
    def parts(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """Return the rewrites that are made, each with its sites, or None for all sites."""
        found = [_PART.fullmatch(part) for part in self.rewrite.split(_BETWEEN)]
        if None in found:
            return [(self.rewrite, None)]
        return [(part["rewrite"], _numbers(part["sites"]) if part["sites"] else None) for part in found if part]

    @staticmethod
    def of(text: str) -> VariantName:
        """Read a variant's name from a table; a suffix that is no known chain stays part of the rewrite."""
        rewrite, _, chain = text.rpartition(_BETWEEN)
        return VariantName(rewrite, LONG_LIVED) if chain == LONG_LIVED else VariantName(text)

    @staticmethod
    def at(sites: Mapping[str, Sequence[int]], chain: ChainName = NO_LONG_LIVED) -> VariantName:
        """Return the name of the variant in which rewrites are made at some of their sites."""
        parts = [f"{name}[{ranges_of(sorted(own))}]" for name, own in sites.items() if own]
        return VariantName(_BETWEEN.join(parts) or PLAIN, chain)


def ranges_of(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `0-3,7`."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [n for _, n in run]
        runs.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(runs)


def _numbers(ranges: str) -> tuple[int, ...]:
    found: set[int] = set()
    for run in ranges.split(","):
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
