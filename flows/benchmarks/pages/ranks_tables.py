"""Describes the table of several ranks that train under one plan, beside DistributedDataParallel and FSDP2."""

from __future__ import annotations

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import Column, Section, TablePage, text

RUN = "python -m stowage.flows.benchmark several-gpus"

RANKS = Section(
    "several_gpus",
    "",
    "Two ranks with gloo, one thread each, on a machine of two cores, which they share: GPT-2 of 6 layers × 384 in "
    "float32 with dropout, batches of 4 × 128, AdamW; medians of 7 steps of one run, or of 7 steps in "
    "each of two rounds or three, in turn, where quartiles stand beside them; planned with `quick`, timed without "
    "checks. "
    "FSDP2 shards block by block and lets weights go after forward, where nothing else is said. Each plan has a "
    "peak as its budget that was measured of another contestant. *Losses and weights* are compared with "
    "DistributedDataParallel's, bit for bit.",
    RUN,
    (
        text("contestant", ""),
        Column("budget_bytes", "budget of a rank", f.mib, optional=True),
        Column("predicted_bytes", "predicted peak", f.mib, optional=True),
        Column("peak_bytes", "peak of a rank", f.mib),
        Column("step_s", "a step", f.milliseconds),
        Column("low_s", "a quarter below", f.milliseconds, optional=True),
        Column("high_s", "a quarter above", f.milliseconds, optional=True),
        text("equal", "losses and weights"),
    ),
)

PAGE = TablePage("several_gpus", "Several ranks under one plan", "", (RANKS,))
