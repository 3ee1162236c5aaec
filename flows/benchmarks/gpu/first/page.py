"""Writes what the first minutes found as one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, CommandStep, StepResult
from stowage.stages.ir.errors import size_text

PAGE = "first.md"
LOG_LINES = 12
SOLID = ("requested", "allocated", "reserved")


def page_of(
    steps: Sequence[CommandStep], results: Mapping[str, StepResult], device: str, command: str, code: str = ""
) -> str:
    """Return the page in Markdown.

    Args:
        steps: everything that is asked.
        results: what was answered so far.
        device: `cuda` or `cpu`.
        command: the command line that continues.
        code: the version of this code.
    """
    parts = [
        "# The first minutes on a card" if device == "cuda" else "# The first minutes, on a CPU: what a card is asked",
        "\n".join(_head(results, device, code)),
        "\n".join(_table(steps, results)),
        "\n".join(["## Numbers", "", *_numbers(results, device)]),
        "\n".join(_details(steps, results)),
        "\n".join(["## How to go on", "", *_next(steps, results, command)]),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _head(results: Mapping[str, StepResult], device: str, code: str) -> Iterator[str]:
    found = results["card"].numbers if "card" in results else {}
    dates = sorted(result.when for result in results.values() if result.when)
    card = found.get("card", "not known yet") if device == "cuda" else NOT_ASKED
    yield f"- card: {_listed(card)}"
    yield f"- clocks: {found.get('clocks', 'not known yet')}"
    yield f"- versions: {_listed(found.get('versions', 'not known yet'))}"
    yield f"- settings: {_listed(found.get('settings', 'not known yet'))}"
    if code:
        yield f"- code: {code}"
    if dates:
        yield f"- when: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")


def _table(steps: Sequence[CommandStep], results: Mapping[str, StepResult]) -> Iterator[str]:
    yield "| step | what | result | seconds | |"
    yield "|---|---|---|---|---|"
    for step in steps:
        result = results.get(step.name)
        if result is None:
            yield f"| {step.name} | {step.about} | not run yet | | |"
            continue
        said = result.why or (result.lines[0] if result.lines else "")
        yield f"| {step.name} | {step.about} | **{result.status}** | {result.seconds:.0f} | {_cell(said)} |"


def _numbers(results: Mapping[str, StepResult], device: str) -> Iterator[str]:
    def of(step: str, key: str) -> Any:
        return results[step].numbers.get(key) if step in results else None

    for name, choice in (of("card", "attention") or {}).items():
        yield f"- attention, {name}: {choice}"
    seed = "efficient attention's philox seed and offset"
    yield f"- {seed}: {of('card', seed) or 'not known yet'}"
    free = of("card", "free host memory, bytes")
    if free is not None:
        yield f"- free host memory: {size_text(free)}, {of('card', 'cores')} cores"
    pinning = of("card", "pinning, bytes per second")
    yield f"- pinning: {f'{pinning / 1e9:.2f} GB/s' if isinstance(pinning, float) else pinning or 'not known yet'}"
    yield f"- direct write: {of('card', 'direct write') or 'not known yet'}"
    yield f"- rates: {of('measure', 'rates') or 'not known yet'}"
    yield f"- noise of plain PyTorch against itself: {of('noise', 'noise') or 'not known yet'}"
    share = of("idle", "idle share")
    if share is None:
        yield "- idle share of an eager step: not known yet"
    else:
        sums, step = of("idle", "sum of calls, seconds"), of("idle", "step, seconds")
        yield f"- idle share of an eager step: {share:.1%} (calls {sums * 1e3:.2f} ms of {step * 1e3:.2f} ms)"
    small = results.get("small")
    if small is not None and small.lines:
        yield f"- small model: {'; '.join(small.lines)}"
    yield from ("", *_peaks(results, device))


def _peaks(results: Mapping[str, StepResult], device: str) -> Iterator[str]:
    rows = {
        name: row
        for step in ("train", "no-limit")
        if step in results
        for name, row in results[step].numbers.items()
        if isinstance(row, dict)
    }
    if not rows:
        yield "Peaks of training: not known yet."
        return
    yield "| contestant | requested | allocated | reserved | retries | step | ± | predicted | clocks | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        missing = NOT_ASKED if device != "cuda" else "–"
        sizes = [size_text(row[key]) if row[key] >= 0 else missing for key in SOLID]
        retries = str(row["retries"]) if row["retries"] >= 0 else missing
        times = [_seconds(row["step, seconds"]), _share(row["spread"]), _seconds(row["predicted, seconds"])]
        yield f"| {' | '.join([name, *sizes, retries, *times, row['clocks'] or missing, _cell(row['note'])])} |"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value == value else "–"


def _share(value: float) -> str:
    return f"{value:.0%}" if value == value else "–"


def _details(steps: Sequence[CommandStep], results: Mapping[str, StepResult]) -> Iterator[str]:
    for step in steps:
        result = results.get(step.name)
        if result is None or result.status == "held":
            if result is not None and step.name in ("strict", "lanes"):
                yield from (f"## {step.name}", "", *_equalities(result.numbers), "")
            continue
        if result.finished and result.status == "not run":
            continue
        yield from (f"## {step.name}: {result.status}", "", result.why, "")
        yield from (*_equalities(result.numbers), "") if step.name in ("strict", "lanes") else ()
        if result.log and result.status in ("fell", "timed out"):
            yield from ("```", *(line.replace("```", "'''") for line in result.log[-LOG_LINES:]), "```", "")


def _equalities(numbers: Mapping[str, Any]) -> Iterator[str]:
    for name, found in numbers.items():
        yield f"- {name}: {_listed(found)}"


def _next(steps: Sequence[CommandStep], results: Mapping[str, StepResult], command: str) -> Iterator[str]:
    left = [step.name for step in steps if step.name not in results or not results[step.name].finished]
    fallen = [name for name, result in results.items() if result.status in ("fell", "timed out")]
    if left:
        yield f"- `{command}` goes on with {', '.join(left)}."
    for name in left:
        if name in results and results[name].why:
            yield f"- {name}: {results[name].why}."
    if fallen:
        yield f"- `{command} --again fell` asks again what did not hold: {', '.join(fallen)}."
    if not left and not fallen:
        yield "- Everything is answered, and everything held: `python -m stowage.flows.gpu race` is next."
    yield "- Whole logs and numbers are in `steps/`."


def _listed(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found)
    return ", ".join(f"{key} {_value(value)}" for key, value in found.items() if value != "") or "none"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return size_text(value) if isinstance(value, int) and value > 1 << 20 else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
