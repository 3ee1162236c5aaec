"""Finds which calls of a step cost a part of the error that its gradient may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite import Way
from stowage.stages.rewrite.identity import CallKey, Names
from stowage.stages.rewrite.lossy import CODECS, Classes
from stowage.stages.solve.request import PlanRequest

Charges = Mapping[frozenset[CallKey], float]
"""Calls that pack the tensors of one class in one kind of codes, with the share of the limit that the class takes."""


def charges_of(recorded: Way, ways: Sequence[Way], request: PlanRequest) -> Charges:
    """Return what the classes of tensors cost that some way keeps in fewer bits; nothing where there is no limit.

    Squares of errors add up, so a share is that of the squared limit. A class counts whole if one layer is packed.

    Args:
        recorded: the step as it was recorded.
        ways: rewrites of it.
        request: with the errors that were measured, and the limit.
    """
    if math.isinf(request.max_gradient_error):
        return {}
    parts = [(kind, sites) for way in ways for kind, sites in VariantName.of(way.name).parts if kind in CODECS]
    kinds = dict.fromkeys(kind for kind, _ in parts if not CODECS[kind].exact)
    rows = {(e.kind, e.tensors): e.squared_error for e in request.errors}
    classes, old = Classes(recorded.trace), set(recorded.names.call)
    found: dict[frozenset[CallKey], float] = {}
    for (kind, name), members in classes.members(kinds).items():
        own = {site for site, _ in members}
        if not any(k == kind and (sites is None or not own.isdisjoint(sites)) for k, sites in parts):
            continue
        trace = classes.trace(kind, name)
        calls = Names(trace).call
        packing = {calls[c.call] for c in trace.calls if c.phase == "forward"} - old
        limit = request.max_gradient_error**2
        found[frozenset(packing)] = rows.get((kind, name), math.inf) / limit if limit else math.inf
    return found
