"""Compares what ranks are about to do, before they exchange tensors: ranks that do different things would wait forever.

What is compared are facts: texts of one or more lines, with names such as `batch`. All ranks hear of a difference, and
which rank it is.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from stowage.stages.ir.errors import RankError
from stowage.stages.runtime.sharding.ranks import Ranks

SHOWN = 100
"""Characters of a fact that an error shows, from where it differs on."""

BEFORE = 20
"""Characters before the first difference that are shown too."""


def agree(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Return if all ranks have the same facts; all call this together.

    Raises:
        RankError: on all ranks, where one has other facts than most.
    """
    digest = hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=7).digest()
    if ranks.same(int.from_bytes(digest, "big"), "what all ranks are about to do"):
        return
    found = ranks.all(dict(facts), "what all ranks are about to do")
    raise RankError(_difference(found))


def _difference(found: Sequence[Mapping[str, str]]) -> str:
    """Return which rank departs from most of them, and in what, as a sentence."""
    for name in dict.fromkeys(name for facts in found for name in facts):
        values = [facts.get(name, "nothing") for facts in found]
        usual = Counter(values).most_common(1)[0][0]  # of equally many, what the first rank has
        other = next((rank for rank, value in enumerate(values) if value != usual), None)
        if other is not None:
            own, theirs = _shown(values[other], usual)
            return (
                f"Rank {other} has another {name} than rank {values.index(usual)}: {own}, not {theirs}; give all ranks "
                "the same."
            )
    return "Ranks differ, and not in anything that has a name; start them with the same script and versions."


def _shown(one: str, other: str) -> tuple[str, str]:
    """Return the first lines that differ, of long ones the stretch that does."""
    lines = zip_longest(one.split("\n"), other.split("\n"), fillvalue="nothing")
    one, other = next(pair for pair in lines if pair[0] != pair[1])
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    begin = max(same - BEFORE, 0) if max(len(one), len(other)) > SHOWN else 0

    def part(text: str) -> str:
        return ("…" if begin else "") + text[begin : begin + SHOWN] + ("…" if len(text) > begin + SHOWN else "")

    return part(one), part(other)
