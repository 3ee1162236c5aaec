"""Describes the page of how far plans are from the optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, TablePage, text

PROVEN = f"{COMMAND} proven"


def _over(value: float) -> str:
    return f"{value:.4f}" if value < 1.01 else f"{value:.3f}"


OURS = Section(
    "proven_ours",
    "Our plans",
    "*Over the bound* is the predicted time of the plan over a time that no schedule within the budget beats, "
    "whatever it keeps and computes again: 1.0000 is the optimum. Shares are of the activation budget, for the "
    "main job of plain PyTorch's peak; *smallest* is the least budget for which our rules find a plan. *Optimal* "
    "is said within a thousandth. Where a plan is further than a hundredth, either side may be loose: the bound "
    "counts memory at its cuts alone, and the plan is what was found within seconds. Of the LSTM both are: with 40 s "
    "instead of 5, the bound rises and the plan gets faster (on another machine 1.288 became 1.061). Which side it is "
    "at the smallest budgets is not known: memory is full at many nodes there, of which a few cuts see a few. "
    "*Proven in* is what the bound and the search by cuts take by themselves, of 5 s at most, for the long model 60. "
    "These plans have all of that time; `fit` gives it 12% of "
    "what planning took until then. *By fit* is the plan over the bound that it states when it plans from the model on "
    "with costs and options stored, where that share is least. A machine that is busy while operators are timed has "
    "another table, in which small operators of several threads take up to ten times as long, and may be "
    "farther from its bound: the scan at 50% was 1.042 on such a one. "
    "Times of the long model, whose calls are too large to run here, are the roofline's.",
    PROVEN,
    (
        text("model", "model"),
        text("budget", "budget"),
        Column("budget_bytes", "budget", f.mib),
        Column("time_s", "step", f.milliseconds),
        Column("over_bound", "over the bound", _over, bold_with="over_bound"),
        text("status", "status"),
        Column("cuts", "cuts", f.count),
        Column("seconds", "proven in", f.seconds),
        Column("fit_over_bound", "by fit", _over, optional=True),
    ),
)

OTHERS = Section(
    "proven_others",
    "Everybody, over the same bound",
    "Rotor's and Chen's plans are by Stowage's own implementations and predicted as ours are. The points of "
    "`torch.utils.checkpoint` and of PyTorch's `activation_memory_budget` are those that the benchmarks of "
    "rematerialization and of the main job have measured: their overhead over plain PyTorch on top of the predicted "
    "time of keeping everything, within their measured peak; a few percent of that are the machine's. Where Rotor's "
    "or Chen's cell of a share is empty, their rule has no plan within it.",
    PROVEN,
    (
        text("model", "model"),
        text("budget", "within the memory of"),
        Column("budget_bytes", "budget", f.mib),
        Column("Stowage", "Stowage", _over, bold_with="Stowage"),
        Column("Rotor", "Rotor", _over),
        Column("Chen", "Chen's √n", _over),
        Column("torch.utils.checkpoint", "`torch.utils.checkpoint`", _over),
        Column("activation_memory_budget", "`activation_memory_budget`", _over),
    ),
)

TIMES = Section(
    "proven_planning",
    "What it costs planning",
    "Planning at 50% from the trace to the program, with and without cuts and greedy eviction, in turns, the median of "
    "three; cuts may take 12% of the time that planning took so far, eviction 4%, each 0.1 s at least. Costs and "
    "options are stored: with nothing stored, both take longer by the same. `quick` cuts nothing, and has three rules "
    "of greedy eviction before schedules of blocks: its columns are without and with these.",
    PROVEN,
    (
        text("model", "model"),
        Column("without_s", "without", f.seconds),
        Column("with_s", "with", f.seconds),
        Column("ratio", "ratio", f.ratio, bold_with="ratio"),
        Column("quick_without_s", "quick, without", f.seconds, optional=True),
        Column("quick_with_s", "quick, with", f.seconds, optional=True),
        Column("quick_ratio", "ratio", f.ratio, bold_with="quick_ratio", optional=True),
    ),
)

EVICTION = Section(
    "proven_eviction",
    "What greedy eviction adds",
    "Plans on one table of costs, without cuts: with all other planners and no rule of greedy eviction, and with its "
    "rules beside them. The last two rows of a model are the smallest budgets for which a plan is found without it and "
    "with it; a plan that does not fit is left out.",
    PROVEN,
    (
        text("model", "model"),
        text("budget", "budget"),
        Column("budget_bytes", "budget", f.mib),
        Column("without_s", "step without", f.milliseconds),
        Column("with_s", "step with", f.milliseconds),
        Column("ratio", "ratio", f.ratio, bold_with="ratio"),
    ),
)

PAGE = TablePage(
    "proven",
    "How far plans are from the optimum",
    "Every plan without a lower tier is compared with the bound of the cut formulation, which holds for every schedule "
    "of the same operations. Predicted times on both sides.",
    (OURS, OTHERS, TIMES, EVICTION),
)


def sections_of(
    cells: Sequence[Mapping[str, Any]],
    planning: Sequence[Mapping[str, Any]] = (),
    eviction: Sequence[Mapping[str, Any]] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables."""
    ours = [dict(c) for c in cells if c["who"] == "Stowage" and c["budget"] != "" and not _by_others(c)]
    for row in ours:
        if row["budget_bytes"] < 0:
            row |= dict.fromkeys(("budget_bytes", "time_s", "over_bound", "cuts", "seconds", "fit_over_bound"))
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in cells:
        if cell["budget_bytes"] < 0:
            continue
        key = cell["model"], cell["budget"], cell["budget_bytes"]
        row = rows.setdefault(key, {"model": key[0], "budget": key[1], "budget_bytes": key[2]})
        row[cell["who"]] = cell["over_bound"]
    everybody = list(rows.values())
    return {
        "proven_ours": ours,
        "proven_others": everybody,
        "proven_planning": [_with_ratios(row) for row in planning],
        "proven_eviction": [_compared(row) for row in eviction],
    }


def _with_ratios(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {**row, "ratio": row["with_s"] / row["without_s"]}
    if "quick_with_s" in row:
        found["quick_ratio"] = row["quick_with_s"] / row["quick_without_s"]
    return found


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    both = row["without_s"] is not None and row["with_s"] is not None
    return {**row, "ratio": row["with_s"] / row["without_s"] if both else None}


def _by_others(cell: Mapping[str, Any]) -> bool:
    return not (str(cell["budget"]).endswith("%") or cell["budget"] == "smallest")
