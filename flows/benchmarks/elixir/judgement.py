"""Judges the simulator: who fits, how many cells are within 20%, and the speed-ups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stowage.flows.benchmarks.elixir.constants import JUDGED
from stowage.flows.benchmarks.elixir.machines import MACHINES
from stowage.flows.benchmarks.elixir.rows import ElixirRow, speedup

NAMES = {
    "elixir": "Elixir",
    "fsdp": "FSDP",
    "zero_2": "ZeRO-2",
    "zero_3": "ZeRO-3",
    "zero_2_offload": "ZeRO-2 offloaded",
    "zero_3_offload": "ZeRO-3 offloaded",
}
"""Engines that are simulated and were published, by column."""

WITHIN = 0.2
"""Share of the published TFLOPS by which a cell may be off."""

WHY = {
    ("zero_2", "A100 80GB PCIe"): "Nothing in DeepSpeed's documentation or code takes the missing 8 GiB at least. One "
    "more float32 copy of a rank's shard (4 bytes an element over n) would; FusedAdam makes none.",
    ("zero_2_offload", "A100 40GB SXM"): "On the device are the weights (2 bytes an element), two buckets and the "
    "activations. That it ran out at every n, and for 20b on 80 GB, would fit weights that are there twice while "
    "DeepSpeed flattens them; its code moves them to the host for that.",
}
"""Why the simulator and the paper disagree about who fits, by engine and machine."""

GIB = 1 << 30

Cell = tuple[float, float, bool]


def judged_rows(rows: Sequence[ElixirRow]) -> list[dict[str, Any]]:
    """Count for each machine and engine the cells within 20%: of those fitted to, and of all others."""
    found: list[dict[str, Any]] = []
    for machine in MACHINES:
        mine = [row for row in rows if row.published.machine == machine]
        found += [{"machine": machine, "engine": NAMES[e], **_counts(_cells(mine, [e]))} for e in JUDGED]
    found.append({"machine": "both", "engine": "all of them", **_counts(_cells(rows, JUDGED))})
    return found


def _cells(rows: Iterable[ElixirRow], engines: Iterable[str]) -> list[Cell]:
    found = []
    for row in rows:
        for engine in engines:
            published = row.published.tflops[engine]
            if published is not None:
                found.append((row.simulated[engine] or 0.0, published, row.fitted))
    return found


def _counts(cells: Sequence[Cell]) -> dict[str, int]:
    good = [abs(simulated / published - 1) <= WITHIN for simulated, published, _ in cells]
    fitted = [is_fitted for *_, is_fitted in cells]
    return {
        "fitted": sum(fitted),
        "fitted_within": sum(g and f for g, f in zip(good, fitted, strict=True)),
        "judged": len(cells) - sum(fitted),
        "judged_within": sum(g and not f for g, f in zip(good, fitted, strict=True)),
    }


def fits_rows(rows: Sequence[ElixirRow]) -> list[dict[str, Any]]:
    """Count for each engine the cells about which simulator and paper agree: it fits, or it runs out of memory."""
    found = []
    for engine, name in NAMES.items():
        agree = [(row.simulated[engine] is None) == (row.published.tflops[engine] is None) for row in rows]
        found.append({"engine": name, "cells": len(rows), "agree": sum(agree)})
    return found


def missed_rows(rows: Sequence[ElixirRow]) -> list[dict[str, Any]]:
    """List every cell that fits here and not there, or there and not here."""
    found = []
    for row in rows:
        p = row.published
        for engine, name in NAMES.items():
            if (row.simulated[engine] is None) != (p.tflops[engine] is None):
                found.append(
                    {
                        "configuration": f"{p.machine}, {p.ranks} × {p.model}, batch {p.batch}",
                        "engine": name,
                        "simulated": "fits" if row.simulated[engine] else f"{row.lacks[engine]} too small",
                        "published": "out of memory" if p.tflops[engine] is None else "fits",
                        "device": f"{row.device_bytes[engine] / GIB:.1f} GiB",
                        "of": f"{MACHINES[p.machine].with_ranks(p.ranks).device_bytes / GIB:.1f} GiB",
                        "why": WHY.get((engine, p.machine), "not known"),
                    }
                )
    return found


def speedups(rows: Sequence[ElixirRow], machine: str) -> Mapping[str, tuple[float, ElixirRow]]:
    """Return the largest speed-up over the best of DeepSpeed's settings on a machine, simulated and published."""
    mine = [row for row in rows if row.published.machine == machine]
    simulated = [(s, row) for row in mine if (s := speedup(row.simulated)) is not None]
    published = [(s, row) for row in mine if (s := speedup(row.published.tflops)) is not None]
    return {
        "simulated": max(simulated, key=lambda found: found[0]),
        "published": max(published, key=lambda found: found[0]),
    }
