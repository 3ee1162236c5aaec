"""Makes the variants of a trace: as it was recorded, rewritten everywhere, or rewritten at some sites alone."""

from __future__ import annotations

from pathlib import Path

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.variant import PLAIN, VariantName
from stowage.stages.rewrite.identity import Names
from stowage.stages.rewrite.lossy import CODECS
from stowage.stages.rewrite.rewrites import REWRITES, Rewrite


def variants_of(trace: TraceTables) -> dict[str, TraceTables]:
    """Return the trace and every rewrite that changes it, by name; those that must be asked for are left out."""
    found = {PLAIN: trace}
    for name, rewrite in REWRITES.items():
        if rewrite.asked:
            continue
        rewritten = rewrite.everywhere(trace)
        if rewritten is not trace:
            found[name] = rewritten
    return found


def rewritten(trace: TraceTables, variant: str) -> TraceTables:
    """Return the trace of a variant.

    Args:
        trace: the trace as it was recorded.
        variant: its name, see `VariantName`.

    Raises:
        TableError: there is no such rewrite, or no such site of it.
    """
    found = trace
    for name, sites in VariantName.of(variant).parts:
        if name == PLAIN:
            continue
        rewrite = REWRITES.get(name)
        if rewrite is None:
            raise TableError(f"There is no rewrite {name!a} of a trace: run the solve stage (`dvc repro`).")
        found = rewrite.everywhere(found) if sites is None else _at(found, trace, rewrite, sites)
    return found


def _at(found: TraceTables, trace: TraceTables, rewrite: Rewrite, sites: tuple[int, ...]) -> TraceTables:
    """Rewrite at some sites of the trace as it was recorded, which earlier rewrites may have numbered anew."""
    calls = rewrite.sites(trace)
    if max(sites) >= len(calls):
        raise TableError(
            f"Rewrite {rewrite.name} has {len(calls)} sites in this trace, not {max(sites) + 1}: run the solve stage "
            "(`dvc repro`)."
        )
    recorded, now = Names(trace), Names(found)
    wanted = {recorded.call[calls[site]] for site in sites}

    def where(call: Call) -> bool:
        return now.call[call.call] in wanted

    return rewrite.apply(found, where)


def is_exact(variant: str) -> bool:
    """Say whether a variant's numbers are those of the trace as it was recorded, bit for bit."""
    names = [name for name, _ in VariantName.of(variant).parts if name != PLAIN]
    return all(name in REWRITES and REWRITES[name].exact for name in names)


def kinds_of(variant: str) -> dict[str, bool]:
    """Return the kinds of codes that a variant keeps values in, each with whether it is exact."""
    names = [name for name, _ in VariantName.of(variant).parts if name in CODECS]
    return {CODECS[name].kind: CODECS[name].exact for name in names}


def is_asked(variant: str) -> bool:
    """Say whether a variant has rewrites that are made only where the user has asked for them."""
    return any(name in REWRITES and REWRITES[name].asked for name, _ in VariantName.of(variant).parts)


def is_for_freezing(variant: str) -> bool:
    """Say whether a variant has rewrites that spare memory only in steps that freeze something."""
    names = [name for name, _ in VariantName.of(variant).parts]
    return any(name in REWRITES and REWRITES[name].for_freezing for name in names)


def load_variant(folder: Path, variant: str) -> TraceTables:
    """Read a trace and rewrite it as its variant.

    Raises:
        TableError: a table is missing or damaged, or there is no such variant.
    """
    trace = TraceTables.load(folder)
    try:
        return rewritten(trace, variant)
    except TableError as error:
        raise TableError(f"{folder}: {error}") from None
