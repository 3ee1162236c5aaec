"""Describes the page of what may be frozen and kept in codes."""

from __future__ import annotations

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, TablePage, text

SLIMFIT = f"{COMMAND} slimfit"

_POLICIES = {
    "ils": "ILS",
    "random": "random",
    "progressive": "progressive",
    "round_robin": "round-robin",
    "prefix": "static prefix",
}

ACCURACY = Section(
    "slimfit_accuracy",
    "Accuracy by policy",
    "Right answers on what was held out, in percent, mean ± standard deviation over seeds. *bytes*: the next byte of "
    "Python's language reference, after pre-training on the standard library's sources (GPT-2, 4 × 64). *packages*: "
    "from which of eight packages of the standard library 64 bytes of source are, after the same pre-training. "
    "*digits*: scikit-learn's digits, after telling how they were turned (ViT, 4 × 64). Each run has 150 to 200 "
    "iterations of AdamW; a seed draws the head, the batches and dropout. Units are those that save memory when they "
    "are frozen together; distances are ‖Δ‖₁/‖w‖₁. Progressive freezing begins with none and ends at the rate after "
    "half of the iterations.",
    SLIMFIT,
    (
        text("task", "task"),
        Column("rate", "frozen", f.percent),
        Column("seeds", "seeds"),
        Column("everything", "all train"),
        *(Column(key, heading) for key, heading in _POLICIES.items()),
    ),
    picture="slimfit_accuracy.png",
)

DIFFERENCES = Section(
    "slimfit_differences",
    "What freezing costs",
    "Points of accuracy lost or won beside training everything with the same seed: mean over tasks and seeds, and its "
    "standard error. A policy is ahead of another where the difference is well beyond both errors.",
    SLIMFIT,
    (
        text("policy", "policy"),
        Column("rate", "frozen", f.percent),
        Column("runs", "runs"),
        Column("difference", "points", lambda x: f"{x:+.2f}"),
        Column("error", "standard error", lambda x: f"{x:.2f}"),
    ),
)

PAGE = TablePage(
    "slimfit",
    "What may be frozen and kept in codes",
    "SlimFit's claims, tried on tasks that are on every machine, and what its ideas are worth as choices of one plan.",
    (ACCURACY, DIFFERENCES),
)
