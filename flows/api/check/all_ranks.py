"""Raises on all ranks what one of them finds, so that all plan anew together."""

from __future__ import annotations

from collections.abc import Callable

from stowage.stages.ir.errors import StaleStep
from stowage.stages.runtime.sharding.ranks import Ranks


def on_all(ranks: Ranks | None, compare: Callable[[], None]) -> None:
    """Compare on this rank; what is found on one rank is raised on all.

    Raises:
        StaleStep: the results differ here, or on another rank.
    """
    if ranks is None:
        compare()
        return
    own: StaleStep | None = None
    try:
        compare()
    except StaleStep as error:
        own = error
    told = ranks.all((str(own), own.call, own.agreed) if own is not None else None, "what plain PyTorch gave")
    if own is not None:
        raise own
    for rank, found in enumerate(told):
        if found is not None:
            text, call, agreed = found
            raise StaleStep(f"Rank {rank}: {text}", call, agreed)
