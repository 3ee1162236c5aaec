"""Takes techniques that save memory alone, in pairs and all at once, each as one plan of one fine-tuning step.

Tables 10 to 12 of the SlimFit paper have its freezing and codes beside gradient accumulation, checkpointing and LoRA.
Here each is a leave of `fit`, so that a pair is one plan and not two systems on top of each other.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from stowage.flows.benchmarks.slimfit.pair_job import TECHNIQUES, PairJob, PairRow, PairSize, measured
from stowage.flows.benchmarks.slimfit.pairs_on_ranks import measured_on_ranks

SLIMFIT = ("freeze", "quantise", "prune")
"""What the paper has at once."""

BESIDE_SLIMFIT = ("accumulate", "recompute", "LoRA")
"""What its tables 10, 11 and 12 have beside that."""

PAPER: Mapping[str, str] = {
    "freeze + quantise + prune": "14.5 GB, 242 s",
    "accumulate": "5.7 GB, 257 s",
    "freeze + quantise + prune + accumulate": "3.2 GB, 262 s",
    "recompute": "10.2 GB, 307 s",
    "freeze + quantise + prune + recompute": "8.1 GB, 319 s",
    "LoRA": "29.5 GB, 215 s",
    "freeze + quantise + prune + LoRA": "14.2 GB, 233 s",
}
"""What the paper's tables 10 to 12 have: memory on the GPU, and the time of an epoch."""


def combinations(of: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Return nothing, each technique, each pair, SlimFit with and without others, and all.

    Args:
        of: techniques; only what has one of them is returned.
    """
    every = [c for count in (0, 1, 2) for c in itertools.combinations(TECHNIQUES, count)]
    every += [SLIMFIT, *((*SLIMFIT, other) for other in BESIDE_SLIMFIT)]
    return [c for c in [*every, TECHNIQUES] if not of or set(of).intersection(c)]


def measured_pairs(
    stores: Path, wanted: Iterable[tuple[str, ...]], updates: int = 7, size: PairSize | None = None
) -> Iterator[PairRow]:
    """Yield a row for each combination.

    Args:
        stores: folder of the stores, see `cache_dir` of `fit`.
        wanted: the combinations.
        updates: timed updates of each.
        size: how large the model is, if not as the page has it.
    """
    for techniques in wanted:
        with tempfile.TemporaryDirectory() as folder:
            job = PairJob(frozenset(techniques), stores, Path(folder), size or PairSize())
            yield measured_on_ranks(job, updates) if job.sharded else measured(job, updates)
