"""Runs what of the benchmark is asked for, and writes its rows and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.slimfit.figure import accuracy_figure
from stowage.flows.benchmarks.slimfit.lossy_plans import CASES, EXACT, LossyRow, compare_lossy
from stowage.flows.benchmarks.slimfit.models import MODELS
from stowage.flows.benchmarks.slimfit.pair_job import TECHNIQUES
from stowage.flows.benchmarks.slimfit.pairs import PAPER, combinations, measured_pairs
from stowage.flows.benchmarks.slimfit.saved import saved_activations
from stowage.flows.benchmarks.slimfit.saved_by_ils import saved_by_ils
from stowage.flows.benchmarks.slimfit.saved_in_codes import saved_in_codes
from stowage.flows.benchmarks.slimfit.static import static_activations
from stowage.flows.benchmarks.slimfit.study import RATES, SEEDS, run_codes, run_study
from stowage.flows.benchmarks.slimfit.summary import by_policy, differences, exact, summarised, with_codes
from stowage.flows.benchmarks.slimfit.tasks import TASKS
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.files import write_atomically
from stowage.stages.ir.lossy import Lossy

FILE = "slimfit.json"
"""Name of the file of all sections' rows."""

MEASURED = "slimfit_measured.json"
"""Name of the file with the names of the sections that the last run has measured."""

Rows = list[dict[str, Any]]


PARTS = ("accuracy", "codes", "saved", "chosen", "coded", "static", "lossy", "pairs")

CHOSEN_MODELS = ("bert",)
"""Models of which is measured what forward saves under the units that ILS chooses: each takes minutes of training."""


def run_parts(out: Path, say: Callable[[str], None], parts: str = "", names: str = "", seeds: int = SEEDS) -> str:
    """Run parts of the benchmark.

    Args:
        out: folder of results.
        say: receives what people should know.
        parts: some of `PARTS`, with commas; by default all.
        names: tasks, models or techniques of these parts, with commas; by default all.
        seeds: how many seeds of each task.

    Raises:
        ParameterError: there is no such part, task, model or technique.
    """
    wanted = [part for part in parts.split(",") if part] or list(PARTS)
    chosen = [name for name in names.split(",") if name]
    _check("part", wanted, PARTS)
    known = {
        "accuracy": tuple(TASKS),
        "codes": tuple(TASKS),
        "saved": tuple(MODELS),
        "chosen": tuple(MODELS),
        "coded": tuple(MODELS),
        "static": tuple(MODELS),
        "lossy": tuple(CASES),
        "pairs": TECHNIQUES,
    }
    _check("task, model or technique", chosen, dict.fromkeys(name for part in wanted for name in known[part]))
    (out / MEASURED).unlink(missing_ok=True)
    run = {
        "accuracy": lambda asked: run_accuracy(out, say, asked, seeds=seeds),
        "codes": lambda asked: run_coded_trials(out, say, asked, seeds=seeds),
        "saved": lambda asked: run_saved(out, say, asked),
        "chosen": lambda asked: run_chosen(out, say, asked),
        "coded": lambda asked: run_coded(out, say, asked),
        "static": lambda asked: run_static(out, say, asked),
        "lossy": lambda asked: run_lossy(out, say, asked),
        "pairs": lambda asked: run_pairs(out, say, asked),
    }
    asked = {part: [name for name in chosen if name in known[part]] for part in wanted}
    return "\n".join(run[part](asked[part]) for part in wanted if asked[part] or not chosen)


def _check(what: str, given: Sequence[str], known: Iterable[str]) -> None:
    there = list(known)
    for name in given:
        if name not in there:
            raise ParameterError(f"There is no {what} {name!r} in this benchmark: write some of {', '.join(there)}.")


def run_accuracy(
    out: Path,
    say: Callable[[str], None],
    tasks: Sequence[str] = (),
    policies: Sequence[str] = (),
    rates: Sequence[float] = RATES,
    seeds: int = SEEDS,
) -> str:
    """Train all tasks under all policies; what an earlier run has finished is not repeated.

    Args:
        out: folder of results.
        say: receives what people should know.
        tasks: see `run_study`.
        policies: see `run_study`.
        rates: see `run_study`.
        seeds: see `run_study`.

    Returns:
        a summary for people.
    """
    with _one_thread():
        rows = run_study(out / "slimfit", say, tasks, policies, rates, seeds)
    codes, rows = with_codes(rows), exact(rows)
    summary = summarised(rows)
    keep(
        out,
        {"slimfit_accuracy": by_policy(summary), "slimfit_differences": differences(rows), "slimfit_codes": codes},
    )
    accuracy_figure(summary).savefig(out / "slimfit_accuracy.png", dpi=110)
    return "\n".join(
        f"{r['policy']}, {r['rate']:.0%} frozen: {r['difference']:+.2f} ± {r['error']:.2f}" for r in differences(rows)
    )


def run_coded_trials(out: Path, say: Callable[[str], None], tasks: Sequence[str] = (), seeds: int = SEEDS) -> str:
    """Train with codes, with everything trained and with most of it frozen, and without as far as it is compared with.

    Args:
        out: folder of results.
        say: receives what people should know.
        tasks: see `run_study`.
        seeds: see `run_study`.

    Returns:
        a summary for people.
    """
    with _one_thread():
        rows = with_codes(run_codes(out / "slimfit", say, tasks, seeds))
    keep(out, {"slimfit_codes": rows})
    return "\n".join(
        f"{r['task']}, {r['rate']:.0%} frozen: {r['difference']:+.2f} ± {r['error'] or 0:.2f}" for r in rows
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_saved(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Measure what forward saves against the freezing rate; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `MODELS`; by default all.
    """

    def measure(name: str) -> tuple[str, Rows]:
        model = MODELS[name]
        return model.label, [{**asdict(row), "batch": model.batch} for row in saved_activations(model)]

    return _by_model(out, say, "slimfit_saved", names or tuple(MODELS), measure)


def run_chosen(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Measure what forward saves under the units that ILS chooses; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `MODELS`; by default `CHOSEN_MODELS`.
    """

    def measure(name: str) -> tuple[str, Rows]:
        model = MODELS[name]
        return model.label, [asdict(row) for row in saved_by_ils(model, said=say)]

    return _by_model(out, say, "slimfit_chosen", names or CHOSEN_MODELS, measure)


def run_coded(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Measure what forward saves with freezing and codes together; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `MODELS`; by default all.
    """

    def measure(name: str) -> tuple[str, Rows]:
        model = MODELS[name]
        found = saved_in_codes(model, said=say)
        return model.label, [{**asdict(row), "batch": model.batch, "kept": ", ".join(row.kept)} for row in found]

    return _by_model(out, say, "slimfit_coded", names or tuple(MODELS), measure)


def run_static(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Tell what saved values are for, against the freezing rate; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `MODELS`; by default all.
    """

    def measure(name: str) -> tuple[str, Rows]:
        model, rows = MODELS[name], dict[str, dict[str, Any]]()
        for found in static_activations(model):
            row = rows.setdefault(found.reader, {"model": model.label, "reader": found.reader})
            row[f"at_{found.rate:.0%}"] = found.nbytes
        return model.label, [row for row in rows.values() if row["at_0%"]]

    return _by_model(out, say, "slimfit_static", names or tuple(MODELS), measure)


def run_lossy(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Compare plans with and without leave; rows of other models stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: models, of `CASES`; by default all.
    """

    def measure(name: str) -> tuple[str, Rows]:
        found = compare_lossy(name, Lossy(), out / "slimfit" / "stores", said=say)
        return name, [_lossy_row(row) for row in found]

    return _by_model(out, say, "slimfit_lossy", names or tuple(CASES), measure)


def run_pairs(out: Path, say: Callable[[str], None], names: Sequence[str] = ()) -> str:
    """Take techniques alone, in pairs and all at once; rows of other combinations stay.

    Args:
        out: folder of results.
        say: receives what people should know.
        names: techniques, of `TECHNIQUES`; by default all combinations.
    """
    wanted = combinations(names)
    rows = {row["techniques"]: row for row in _stored(out).get("slimfit_pairs", [])}
    for found in measured_pairs(out / "slimfit" / "stores", wanted):
        ratio = found.time_s / found.plain_time_s
        paper = PAPER.get(found.techniques, "")
        rows[found.techniques] = {**asdict(found), "kept": ", ".join(found.kept), "ratio": ratio, "paper": paper}
        order = [rows[name] for name in map(" + ".join, combinations()) if name in rows]
        keep(out, {"slimfit_pairs": order})
        say(f"{found.techniques or 'plain training'}: {found.peak_bytes / 2**20:.1f} MiB, {ratio:.2f} × plain")
    return f"{len(wanted)} combinations"


def _by_model(
    out: Path,
    say: Callable[[str], None],
    section: str,
    names: Sequence[str],
    measure: Callable[[str], tuple[str, Rows]],
) -> str:
    """Measure models one by one, each kept as soon as it is done."""
    rows = _stored(out).get(section, [])
    for name in names:
        label, found = measure(name)
        rows = [row for row in rows if row["model"] != label] + found
        keep(out, {section: rows})
        say(f"{label}: done")
    return f"{len(rows)} rows"


def _lossy_row(row: LossyRow) -> dict[str, Any]:
    known = {
        "model": row.model,
        "share": row.share,
        "leave": row.plan,
        "kept": ", ".join(row.kept),
    }
    if not row.feasible:
        return {**known, "leave": f"{known['leave']}: none fits"}
    numbers = ("predicted_peak_bytes", "peak_bytes", "predicted_time_s", "time_s")
    known |= {key: getattr(row, key) for key in numbers}
    if row.plan != EXACT and row.exact_time_s:
        known["speedup"] = row.exact_time_s / row.time_s
    if row.same:
        known |= {"same": True, "time_s": None}
    return known | ({"predicted_error": row.predicted_error, "error": row.error} if row.plan != EXACT else {})


def _stored(out: Path) -> dict[str, Rows]:
    path = out / FILE
    found: dict[str, Rows] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def keep(out: Path, sections: dict[str, Rows]) -> None:
    """Write rows of some sections beside those that are there, and say that this run has measured them."""
    write_atomically(out / FILE, json.dumps({**_stored(out), **sections}).encode())
    measured = sorted({*measured_sections(out), *sections})
    write_atomically(out / MEASURED, json.dumps(measured).encode())


def measured_sections(out: Path) -> list[str]:
    """Return the sections that the last run has measured: pages keep the date of the others."""
    path = out / MEASURED
    found: list[str] = json.loads(path.read_text()) if path.is_file() else []
    return found
