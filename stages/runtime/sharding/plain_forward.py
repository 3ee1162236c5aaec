"""Keeps the plain forwards of ranks in step: each gathers a weight when all do, and all stop where one does.

Before each weight a rank says which one it reads, and at the end how it has ended. So a forward that fails on one rank
alone, or finds no room there, meets the next message of the others, which would wait in a gather otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from stowage.stages.ir.errors import RankError
from stowage.stages.runtime.sharding.agreement import failure_text, raise_failure, told
from stowage.stages.runtime.sharding.ranks import Ranks

Kind = Literal["reads", "ends", "waits", "fails"]
Message = tuple[Kind, str]
Seen = TypeVar("Seen")

WHAT = "what plain PyTorch reads next"


class OtherStopped(BaseException):
    """Raised in a plain forward when another rank's is over; no `Exception`, because a model may catch those.

    Attributes:
        said: the latest message of each rank.
    """

    def __init__(self, said: list[Message]) -> None:
        super().__init__(said)
        self.said = said


def say_read(ranks: Ranks, name: str) -> None:
    """Tell the other ranks which weight a plain forward reads next.

    Raises:
        OtherStopped: another rank does not read it.
    """
    said = _exchange(ranks, ("reads", name))
    if said:
        raise OtherStopped(said)


def in_step(ranks: Ranks | None, forward: Callable[[], Seen | None]) -> Seen | None:
    """Return what a plain forward gives on this rank; None where it cannot run on one of them.

    Raises:
        RankError: it has failed on another rank, or reads something else there.
    """
    if ranks is None:
        return forward()
    failed: Exception | None = None
    seen: Seen | None = None
    said: list[Message] = []
    try:
        seen = forward()
        said = _exchange(ranks, ("ends" if seen is not None else "waits", ""))
    except RankError:
        raise
    except OtherStopped as stopped:
        said = stopped.said
    except Exception as error:
        failed = error
        told(error)
        with suppress(RankError):
            _exchange(ranks, ("fails", failure_text(error)))
    if failed is not None:
        raise failed
    raise_failure([text if kind == "fails" else None for kind, text in said])
    if any(kind == "waits" for kind, _ in said):
        return None
    if said:
        raise RankError(_apart(said))
    return seen


def _exchange(ranks: Ranks, own: Message) -> list[Message]:
    """Return what all ranks say, or nothing where they all say the same."""
    digest = hashlib.blake2b("\n".join(own).encode(), digest_size=7).digest()
    alike = ranks.same(int.from_bytes(digest, "big"), WHAT)
    if alike and own[0] in ("reads", "ends"):
        return []
    return [own] * ranks.count if alike and own[0] == "waits" else ranks.all(own, WHAT)


def _apart(said: list[Message]) -> str:
    """Return how ranks differ, as a sentence."""
    other = next(rank for rank, message in enumerate(said) if message != said[0])
    texts = [f"reads '{name}'" if kind == "reads" else "has ended" for kind, name in (said[0], said[other])]
    return (
        f"Plain PyTorch, which is compared with the plan, {texts[1]} on rank {other} where it {texts[0]} on rank 0: "
        "let all ranks call the same modules."
    )
