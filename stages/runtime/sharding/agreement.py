"""Compares what ranks are about to do, before they exchange tensors: ranks that do different things would wait forever.

What is compared are facts: texts of one or more lines, with names such as `batch`. All ranks hear of a difference, and
which rank it is. A rank that fails alone says so where the others compare next, so that none waits for it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeVar

from stowage.stages.ir.errors import RankError, StowageError
from stowage.stages.runtime.sharding.ranks import Ranks

SHOWN = 100
"""Characters of a fact that an error shows, from where it differs on."""

BEFORE = 20
"""Characters before the first difference that are shown too."""

CALL = "call"
"""The fact of what a rank has been called for, as code."""

FAILURE = "failure"
"""The fact of a rank that has failed: its error, as text."""

NO_HINTS: Mapping[str, str] = MappingProxyType({})

_TOLD = "told_other_ranks"
"""An attribute of errors that the other ranks have heard of."""

Result = TypeVar("Result")


def agree(ranks: Ranks, facts: Mapping[str, str], hints: Mapping[str, str] = NO_HINTS) -> None:
    """Return if all ranks have the same facts; all call this together.

    Args:
        ranks: all of them.
        facts: what must be equal.
        hints: why this rank may have other facts of these names than the others, for errors; they need not be equal.

    Raises:
        RankError: on all ranks, where one has other facts than most.
    """
    digest = hashlib.blake2b(json.dumps(sorted(facts.items())).encode(), digest_size=7).digest()
    if ranks.same(int.from_bytes(digest, "big"), "what all ranks are about to do"):
        return
    found = ranks.all((dict(facts), dict(hints)), "what all ranks are about to do")
    raise_failure([facts.get(FAILURE) for facts, _ in found])
    raise RankError(difference([facts for facts, _ in found], [own for _, own in found]))


@contextmanager
def heard(ranks: Ranks | None) -> Iterator[None]:
    """Let the other ranks hear of an error inside where they compare facts next, instead of waiting for this rank.

    What is exchanged inside has to raise its errors on all ranks.
    """
    try:
        yield
    except RankError:
        raise  # the others have heard of it, or are lost
    except Exception as error:
        if ranks is not None and not getattr(error, _TOLD, False):
            told(error)  # in case another block like this is around
            with suppress(StowageError):
                agree(ranks, {FAILURE: failure_text(error), "rank": str(ranks.rank)})
        raise


def together(ranks: Ranks | None, work: Callable[[], Result]) -> Result:
    """Return what `work` returns for this rank, once it has succeeded for all.

    Raises:
        RankError: it fails for another rank.
    """
    if ranks is None:
        return work()
    failed: Exception | None = None
    try:
        result = work()
    except RankError:
        raise
    except Exception as error:
        if getattr(error, _TOLD, False):
            raise
        failed = error
        told(error)
    if ranks.same(int(failed is not None), "whether all ranks have succeeded") and failed is None:
        return result
    texts = ranks.all(failure_text(failed) if failed is not None else None)
    if failed is not None:
        raise failed
    raise_failure(texts)
    return result


def told(error: BaseException) -> None:
    """Remember that the other ranks have heard of an error."""
    setattr(error, _TOLD, True)


def failure_text(error: BaseException) -> str:
    """Return an error as the other ranks are told of it."""
    return str(error) if isinstance(error, StowageError) else f"{type(error).__name__}: {error}"


def raise_failure(texts: Sequence[str | None]) -> None:
    """Raise the failure of the first rank that has one.

    Raises:
        RankError: a rank has failed.
    """
    for rank, said in enumerate(texts):
        if said is not None:
            raise RankError(f"Rank {rank} failed: {said}")


def difference(found: Sequence[Mapping[str, str]], hints: Sequence[Mapping[str, str]] = ()) -> str:
    """Return which rank departs from most of them, and in what, as a sentence; `hints` say of each rank why."""
    for name in dict.fromkeys(name for facts in found for name in facts):
        values = [facts.get(name, "nothing") for facts in found]
        usual = Counter(values).most_common(1)[0][0]  # of equally many, what the first rank has
        other = next((rank for rank, value in enumerate(values) if value != usual), None)
        if other is not None:
            own, theirs = _shown(values[other], usual)
            if name == CALL:
                one, most = (facts.get(CALL, "something else") for facts in (found[other], found[values.index(usual)]))
                return (
                    f"Rank {other} calls {one} while rank {values.index(usual)} calls {most}: let all ranks call the "
                    "same in the same order, also where one of them writes for all."
                )
            because = f" ({hints[other][name]})" if hints and name in hints[other] else ""
            return (
                f"Rank {other} has another {name} than rank {values.index(usual)}: {own}{because}, not {theirs}; give "
                "all ranks the same."
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
