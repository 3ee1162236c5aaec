"""The table of rewrites of a trace: a new one is a function and a row of `REWRITES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.rewrite.lossy import CODECS, Codec, compress, compressed_sites
from stowage.stages.rewrite.masks import mask_draws, pack_masks

Where = Callable[[Call], bool]
"""Says whether the rewrite is to be made at a call of the trace as it was recorded."""

Calls = Callable[[TraceTables], Sequence[int]]
"""Lists calls of a trace."""


@dataclass(frozen=True)
class Rewrite:
    """One rewrite.

    Attributes:
        name: its name in variants and tables, and for people.
        apply: rewrites a trace at those of its sites at which the predicate holds; where there is none it returns the
            very trace that it was given, and is known by that not to apply.
        sites: the calls at which it can be made, each by itself, in order.
        exact: whether every number stays the same, bit for bit.
        asked: it is made only where the user has asked for it by name.
        for_freezing: it spares memory only in steps that freeze something.
        places: for each site a call of the block that the rewrite changes; None where that is the site itself.
    """

    name: str
    apply: Callable[[TraceTables, Where], TraceTables]
    sites: Calls
    exact: bool = True
    asked: bool = False
    for_freezing: bool = False
    places: Calls | None = None

    def everywhere(self, trace: TraceTables) -> TraceTables:
        """Rewrite a trace at every site."""
        return self.apply(trace, lambda call: True)

    def placed(self, trace: TraceTables) -> list[tuple[int, int]]:
        """Return each site with the call whose block it changes."""
        sites = self.sites(trace)
        return list(zip(sites, self.places(trace) if self.places is not None else sites, strict=True))


def _packing(codec: Codec) -> Rewrite:
    return Rewrite(
        codec.name,
        partial(compress, codec),
        lambda trace: [saved.maker for saved in compressed_sites(trace, codec)],
        exact=codec.exact,
        asked=True,
        for_freezing=codec.for_freezing,
        places=lambda trace: [saved.last for saved in compressed_sites(trace, codec)],
    )


REWRITES: dict[str, Rewrite] = {
    r.name: r for r in (Rewrite("packed", pack_masks, mask_draws), *(_packing(codec) for codec in CODECS.values()))
}
"""Rewrites by name, in the order of preference between equally fast plans, which is the order in which they are made.

`packed` stores dropout masks as bytes; the others keep values for backward in fewer bits, and are made only on request.
"""
