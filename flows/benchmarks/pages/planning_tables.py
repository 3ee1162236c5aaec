"""Describes the tables about how long planning takes."""

from __future__ import annotations

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, text

BIG = Section(
    "big",
    "Models that do not fit this machine",
    "Planned without weights in memory, from nothing to `step.py`, on costs estimated from a device's rates.",
    f"{COMMAND} big",
    (
        text("label", "model"),
        Column("seconds", "planned in", f.whole_seconds),
        Column("peak_bytes", "memory of the process", f.mib),
    ),
)

GROWTH = Section(
    "growth",
    "By the number of layers",
    "A narrow GPT-2, from nothing to `step.py`, in seconds of processor time.",
    f"{COMMAND} growth",
    (
        text("case", "model, method"),
        Column("layers", "layers", f.count),
        Column("seconds", "processor time", f.whole_seconds),
    ),
    "growth.png",
)

PARTITION = Section(
    "partition",
    "H-Partition",
    "Clusters of a graph (thesis 3.3), on one core; the time depends on the shape of the graph.",
    f"{COMMAND} partition",
    (
        Column("nodes", "nodes", f.count),
        Column("least_s", "fastest shape", f.whole_seconds),
        Column("most_s", "slowest shape", f.whole_seconds),
    ),
    "partition.png",
)

DEPTH = Section(
    "remat_depth",
    "Deeper Transformers",
    "From building the model to `step.py`, for Transformers of L + L layers.",
    f"{COMMAND} remat-depth",
    (
        text("case", "model"),
        text("how", "planned"),
        Column("seconds", "time", f.whole_seconds),
        text("clock", "of"),
    ),
    "remat_depth.png",
)

CLUSTER_SIZES = Section(
    "cluster_sizes",
    "Sizes of clusters",
    "A whole step planned as one block by clusters of at most so many members (thesis figure 3.14): the overhead of a "
    "Transformer of 2 + 2 layers at half of the activation budget, on estimated costs.",
    f"{COMMAND} cluster-sizes",
    (
        text("method", "method"),
        Column("size", "members at most", f.count),
        Column("overhead", "overhead", f.tenths),
    ),
    "cluster_sizes.png",
)

OPTIMUM = Section(
    "optimum",
    "Clusters against the optimum",
    "How much clusters lose: on blocks of 12 to 80 nodes of the models in `tests/zoo.py` for which the optimum could "
    "be proven, at three budgets each, as retention intervals and with backward nodes that may run again, as in the "
    "optimum. `tests/options/clusters/test_close_to_the_optimum.py` checks a part of them.",
    "pytest tests/options/clusters/test_close_to_the_optimum.py",
    (
        Column("cases", "cases", f.count),
        Column("worst", "slower than the optimum, at most", f.tenths, bold_with="worst"),
    ),
)

H_ILP = Section(
    "h_ilp",
    "H-ILP and retention intervals",
    "Both formulations of a graph of clusters, on the same graphs: how much slower than the optimum of the block the "
    "best schedule is that each finds, and how long one solve takes on average.",
    "",
    (
        text("what", "what"),
        Column("cases", "cases", f.count),
        Column("h_ilp_worst", "H-ILP: slower, at most", f.tenths),
        Column("h_retention_worst", "intervals: slower, at most", f.tenths),
        Column("h_ilp_s", "H-ILP: a solve", f.about_seconds),
        Column("h_retention_s", "intervals: a solve", f.about_seconds),
    ),
)

NEW_LENGTH = Section(
    "new_length",
    "A new length",
    "How long a batch of a length that was not seen before takes until its step runs; medians.",
    "",
    (text("model", "model"), text("budget", "budget"), Column("seconds", "takes", f.about_seconds)),
)

CHECKS = Section(
    "checks",
    "Checks beside plain PyTorch",
    "What one [check](../reference/exactness.md#nothing-is-wrong-in-silence) takes, in steps; and all of a run's "
    "checks.",
    "",
    (text("what", "what"), Column("least", "from", f.tenths), Column("most", "to", f.tenths)),
)
