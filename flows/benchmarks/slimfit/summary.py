"""Summarises trials: mean and deviation over the seeds, and what each policy loses beside training everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from stowage.flows.benchmarks.slimfit.trials import BASELINE

Rows = list[dict[str, Any]]

PAPER = "ils_paper"
"""The policy of trials whose units and distances are the paper's."""

ALL = "all"
"""Stands for all tasks together."""


def exact(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows of trials without codes; those of ILS as the paper has it are of the policy `PAPER`."""
    return [_named(row) for row in rows if not row.get("codes")]


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "policy": PAPER} if row.get("units") == "parameter" else dict(row)


def with_codes(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a row for each task and rate with what codes cost there, and one for all tasks.

    Returns:
        `task`, `rate`, `runs`, accuracies `exact` and `coded` in percent, their mean `difference` and its standard
        `error`, and the mean of the error of the gradient that was `predicted`.
    """
    key = ["task", "policy", "rate", "seed"]
    plain = pl.DataFrame(exact(rows), infer_schema_length=None).select(*key, without="accuracy")
    own = [dict(row) for row in rows if row.get("codes")]
    if not own:
        return []
    frame = pl.DataFrame(own, infer_schema_length=None).join(plain, on=key)
    both = pl.concat([frame, frame.with_columns(task=pl.lit(ALL))])
    points = pl.col("accuracy") - pl.col("without")
    return (
        both.group_by("task", "rate")
        .agg(
            pl.len().alias("runs"),
            pl.col("without").mean().alias("exact"),
            pl.col("accuracy").mean().alias("coded"),
            points.mean().alias("difference"),
            (points.std() / pl.len().sqrt()).alias("error"),
            pl.col("predicted_error").mean().alias("predicted"),
        )
        .sort("rate", pl.col("task") == ALL, "task")
        .to_dicts()
    )


def summarised(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a row for each task, policy and rate.

    Args:
        rows: what `run_trial` returned.

    Returns:
        `task`, `policy`, `rate`, `mean` and `deviation` of the accuracy in percent over `seeds` seeds.
    """
    return (
        pl.DataFrame(rows, infer_schema_length=None)
        .group_by("task", "policy", "rate", maintain_order=True)
        .agg(
            pl.len().alias("seeds"),
            pl.col("accuracy").mean().alias("mean"),
            pl.col("accuracy").std().alias("deviation"),
        )
        .to_dicts()
    )


def differences(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a row for each policy and rate over all tasks: `difference`, its standard `error`, and `runs`."""
    frame = pl.DataFrame(rows, infer_schema_length=None)
    baseline = frame.filter(pl.col("policy") == BASELINE).select("task", "seed", everything="accuracy")
    points = (pl.col("accuracy") - pl.col("everything")).alias("points")
    joined = frame.filter(pl.col("policy") != BASELINE).join(baseline, on=["task", "seed"]).with_columns(points)
    return (
        joined.group_by("policy", "rate")
        .agg(
            pl.len().alias("runs"),
            pl.col("points").mean().alias("difference"),
            (pl.col("points").std() / pl.len().sqrt()).alias("error"),
        )
        .sort("rate", "difference", "policy", descending=[False, True, False])
        .to_dicts()
    )


def by_policy(summary: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a row for each task and rate with one column a policy, for a table; training everything is in each."""
    whole = {row["task"]: row for row in summary if row["policy"] == BASELINE}
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in summary:
        if row["policy"] == BASELINE:
            continue
        task = row["task"]
        line = found.setdefault((task, row["rate"]), {"task": task, "rate": row["rate"], "seeds": row["seeds"]})
        line.setdefault("everything", _text(whole[task]) if task in whole else "")
        line[row["policy"]] = _text(row)
    return list(found.values())


def _text(row: Mapping[str, Any]) -> str:
    deviation = row["deviation"]
    return f"{row['mean']:.1f}" if deviation is None else f"{row['mean']:.1f} ± {deviation:.1f}"
