"""Describes the tables of the rematerialization benchmark."""

from __future__ import annotations

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, text

REMAT_PEERS = Section(
    "remat_peers",
    "Beside what PyTorch offers",
    "*Stowage, same peak* is the overhead of Stowage's fastest plan whose peak is at most the number to its left; for "
    "several peaks from the least overhead to the most.",
    f"{COMMAND} remat",
    (
        text("model", ""),
        Column("plain", "plain PyTorch"),
        Column("checkpoint", "`torch.utils.checkpoint`"),
        Column("there", "Stowage, same peak"),
        Column("memory_budget", "`activation_memory_budget`"),
        Column("there_too", "Stowage, same peak"),
    ),
    "remat.png",
)

REMAT_SHARES = Section(
    "remat_shares",
    "By share of the activation budget",
    "Measured overhead over plain PyTorch in bold, predicted over keeping everything in brackets.",
    f"{COMMAND} remat",
    (
        text("model", ""),
        Column("65%", "Stowage at 65%"),
        Column("50%", "Stowage at 50%"),
        Column("30%", "Stowage at 30%"),
        Column("smallest", "smallest: peak, share, overhead"),
    ),
)

REMAT_METHODS = Section(
    "remat_methods",
    "Beside Rotor and Chen's √n",
    "Planned by Stowage's own implementations of the two; *Stowage* in bold is its fastest plan within the same peak.",
    f"{COMMAND} remat",
    (
        text("model", ""),
        Column("65%", "Rotor at 65%, Stowage"),
        Column("50%", "Rotor at 50%, Stowage"),
        Column("30%", "Rotor at 30%, Stowage"),
        Column("smallest", "its smallest, Stowage"),
        Column("chen", "Chen's √n, its smallest, Stowage"),
    ),
)

REMAT_ACCURACY = Section(
    "remat_accuracy",
    "Measured over predicted time",
    "Both relative to plain PyTorch, in turns with the plan and among the calls while they were profiled; below 0, "
    "the plan was faster than predicted.",
    f"{COMMAND} remat",
    (
        text("model", "model"),
        Column("plans", "plans", f.count),
        Column("close", "within 10%", f.count),
        Column("least", "from", f.tenths),
        Column("most", "to", f.tenths),
    ),
)
