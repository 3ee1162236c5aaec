"""Writes what ranks found as one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stowage.flows.benchmarks.gpu.ranks.spread import spread_of_rounds
from stowage.flows.benchmarks.gpu.steps import CommandStep, StepResult
from stowage.stages.ir.amounts import size_text, time_text

PAGE = "ranks.md"


def page_of(
    steps: Sequence[CommandStep], results: Mapping[str, StepResult], job: str, ranks: int, device: str, command: str
) -> str:
    """Return the page in Markdown.

    Args:
        steps: everything that is asked.
        results: what was answered so far.
        job: what is trained, for people.
        ranks: the number of ranks.
        device: `cuda` or `cpu`.
        command: the command line that continues.
    """
    return "\n".join(_lines(steps, results, job, ranks, device, command)) + "\n"


def _lines(
    steps: Sequence[CommandStep], results: Mapping[str, StepResult], job: str, ranks: int, device: str, command: str
) -> Iterator[str]:
    where = "cards, with NCCL" if device == "cuda" else "processes of one CPU, with gloo"
    yield f"# {ranks} {where}"
    yield ""
    yield f"{job}; each rank has batches of its own. Losses and weights are compared with DistributedDataParallel's."
    yield ""
    yield "| | budget of a rank | peak of a rank | seconds a step | quartiles | losses and weights |"
    yield "|---|---|---|---|---|---|"
    compared = results["compare"].numbers if "compare" in results else {}
    for step in steps:
        result = results.get(step.name)
        if step.asked.get("kind") != "ranks-train" or "again" in step.asked:
            continue
        if result is None or result.status != "held":
            yield f"| {step.about} | | | | | {(result.why or result.status) if result else 'not run yet'} |"
            continue
        n = result.numbers
        budget = size_text(n["budget_bytes"]) if "budget_bytes" in n else "–"
        if "refused" in n:
            yield f"| {step.about} | {budget} | – | – | – | nothing fits; {size_text(n['needed_bytes'])} would do |"
            continue
        took = spread_of_rounds(step, steps, results)
        yield (
            f"| {step.about} | {budget} | {size_text(n['peak_bytes'])} | {time_text(took.median_s)} | "
            f"{time_text(took.low_s)} to {time_text(took.high_s)} | "
            f"{_exactness(compared.get(step.name)) if step.name != 'ddp' else '–'} |"
        )
    yield ""
    for step in steps:
        result = results.get(step.name)
        if result is not None:
            said = "; ".join([result.why] * bool(result.why) + list(result.lines))
            yield f"- {step.name}: {result.status}{': ' if said else ''}{said}"
            yield from (f"  - `{line}`" for line in result.log[-6:])
    yield ""
    yield f"`{command}` goes on with what is not finished."


def _exactness(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "not compared yet"
    if found["equal"]:
        return "equal, bit for bit"
    return f"losses within {found['loss']:.1e}, weights within {found['weight']:.1e}"
