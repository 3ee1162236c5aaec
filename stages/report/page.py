"""Writes the report as one HTML page: numbers, plots and tables, styled inside; it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from stowage.stages.ir.plan import Option, PlanSummary
from stowage.stages.ir.run import StepRecord, TraceSpan
from stowage.stages.report.activations import BlockFates
from stowage.stages.report.block_tables import fate_legend, treatment_table
from stowage.stages.report.facts import ReportFacts, bound_words, headline, overhead, verdict
from stowage.stages.report.iterations import loss_table, slow_iterations
from stowage.stages.report.streams import streams_tables
from stowage.stages.report.units import percent, seconds, size

_CSS = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1060px; padding: 2rem 1.5rem 4rem; background: #fff; color: #22272d;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
p { margin: .3rem 0 .8rem; max-width: 50rem; } .lead { font-size: 1.05rem; } .quiet { color: #646c75; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid #e6e8eb; vertical-align: top; }
th { color: #646c75; font-weight: 600; font-size: .85rem; } .n { text-align: right; white-space: nowrap; }
td.main { font-weight: 600; } td.main .quiet { font-weight: 400; } td.note { padding-left: 1rem; }
.good { color: #1d7a46; } .bad { color: #b3202e; font-weight: 600; }
code { font: .88em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; } figure { margin: .4rem 0 0; }
details { margin: .2rem 0 .6rem; } summary { cursor: pointer; color: #33608c; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; }
ul.legend { list-style: none; margin: .2rem 0 1rem; padding: 0; } .scroll { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Page:
    """The contents of the page; figures are SVG text, `peak_at` says in which module memory is highest."""

    title: str
    summary: PlanSummary
    facts: ReportFacts
    fates: Sequence[BlockFates]
    options: Sequence[Option]
    steps: Sequence[StepRecord]
    streams: Sequence[TraceSpan]
    figures: Mapping[str, str]
    paths: Mapping[str, str]
    peak_at: str = ""

    def html(self) -> str:
        """Return the whole page."""
        s = self.summary
        sections = [
            f"<h1>{escape(self.title)}</h1>",
            f'<p class="quiet">Method <code>{escape(s.method)}</code>, device {escape(s.device)}, '
            f"plan <code>{escape(s.plan_hash[:12])}</code></p>",
            f'<p class="lead">{escape(_lead(s, self.facts))} {_verdict(self.facts)}</p>',
            _headline_table(s, self.facts, self.peak_at),
            *self._tradeoff(),
            "<h2>Memory over one iteration</h2>",
            "<p>Everything on the device: parameters, gradients, optimizer states, activations, buffers, inputs and "
            "workspace. Each line is drawn over its own iteration, because measuring slows one down.</p>",
            self._figure("memory", "Predicted, measured and plain PyTorch's memory over one iteration"),
            "<h2>Timeline</h2>",
            "<p>What the compute stream does, by predicted time; numbers are blocks of the chain. Backward of a block "
            "that was not kept is preceded by its recomputation.</p>",
            self._figure("timeline", "Timeline of forward, recomputation, backward and updates"),
            *self._streams(),
            "<h2>Block by block</h2>",
            fate_legend(self.fates),
            self._figure("blocks", "Bytes kept, recomputed and dropped by block"),
            treatment_table(self.fates, self.options),
            "<h2>Loss</h2>",
            self._figure("loss", "Loss by iteration, beside plain PyTorch's"),
            slow_iterations(self.steps),
            loss_table(self.steps),
            "<h2>The plan</h2>",
            _pairs(_plan_facts(s)),
            "<h2>Files</h2>",
            _pairs((escape(name), f"<code>{escape(path)}</code>") for name, path in self.paths.items()),
        ]
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
            + "\n".join(sections)
            + "\n</body>\n</html>\n"
        )

    def _tradeoff(self) -> list[str]:
        if "curve" not in self.figures:
            return []
        return [
            "<h2>Step time against budget</h2>",
            "<p>Plans of the same step within other budgets, from keeping everything to the least memory for which "
            "there is a plan; times are predicted.</p>",
            self._figure("curve", "Predicted step time against device budget"),
        ]

    def _streams(self) -> list[str]:
        if not self.streams:
            return []
        return [
            "<h2>Predicted and measured</h2>",
            "<p>One iteration as the plan predicts it and as it ran, stream by stream; red is where computing waits. "
            "Updates on the device are drawn beside the steps that contain them. "
            "trace.json, named below, is the same for https://ui.perfetto.dev.</p>",
            self._figure("streams", "Steps, copies and updates of one iteration, predicted and measured"),
            streams_tables(self.streams),
        ]

    def _figure(self, name: str, alternative: str) -> str:
        svg = self.figures[name].replace("<svg ", f'<svg role="img" aria-label="{escape(alternative)}" ', 1)
        return f"<figure>{svg}</figure>"


def _lead(summary: PlanSummary, facts: ReportFacts) -> str:
    measured = facts.peak_bytes is not None
    peak = facts.peak_bytes if facts.peak_bytes is not None else summary.device_peak_bytes
    eager = facts.eager_peak_bytes if facts.eager_peak_bytes is not None else summary.keep_all_peak_bytes
    fits = "fits" if peak <= summary.device_budget_bytes else "does not fit"
    less = f", where plain PyTorch needs {size(eager)}" if eager > peak else ""
    return (
        f"One training iteration {fits} the budget of {size(summary.device_budget_bytes)}: its "
        f"{'measured' if measured else 'predicted'} peak is {size(peak)}{less}."
    )


def _headline_table(summary: PlanSummary, facts: ReportFacts, peak_at: str) -> str:
    rows = [
        f'<tr><td>{escape(r.label)}</td><td class="n main">{escape(r.plan)}</td><td class="n">{escape(r.eager)}</td>'
        f'<td class="n">{escape(r.ratio)}</td><td class="quiet note">{escape(r.note)}</td></tr>'
        for r in headline(summary, facts)
    ]
    share = summary.recomputed_bytes / summary.activation_bytes if summary.activation_bytes else 0.0
    extra = [
        ("Lower bound on the step time", seconds(summary.least_s),
         f"{escape(bound_words(summary))}; the plan is {percent(overhead(summary))} above it"),
        ("Recomputed", size(summary.recomputed_bytes),
         f"{percent(share)} of {size(summary.activation_bytes)} of activations"),
        ("Smallest feasible budget", size(summary.smallest_feasible_bytes), ""),
    ]  # fmt: skip
    if peak_at:
        extra.append(("Highest in", "", f"<code>{escape(peak_at)}</code>"))
    if summary.budget_found:
        extra.append(("How the budget was found", "", escape(summary.budget_found)))
    rows += [
        f'<tr><td>{label}</td><td class="n main">{value}</td><td></td><td></td><td class="quiet note">{note}</td></tr>'
        for label, value, note in extra
    ]
    return (
        '<div class="scroll"><table><thead><tr><th></th><th class="n">this plan</th><th class="n">plain PyTorch</th>'
        f'<th class="n">ratio</th><th></th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _plan_facts(s: PlanSummary) -> list[tuple[str, str]]:
    estimated = f"{s.estimated_nodes} compute nodes have estimated costs" if s.estimated_nodes else "all measured"
    return [
        ("Plan hash", f"<code>{escape(s.plan_hash)}</code>"),
        ("Training configuration", f"<code>{escape(s.configuration_hash)}</code>"),
        ("Method", f"<code>{escape(s.method)}</code>"),
        ("Solver", escape(s.solver)),
        ("Status", escape(s.status)),
        ("Solver's gap", percent(s.gap)),
        ("Time limit", seconds(s.time_limit_s)),
        ("Seed", str(s.seed)),
        ("Costs", escape(f"{estimated}, on {s.device}")),
    ]


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    return f"<table><tbody>{body}</tbody></table>" if body else '<p class="quiet">None were named.</p>'


def _verdict(facts: ReportFacts) -> str:
    """Return the sentence on the losses, red where losses differ."""
    text = escape(verdict(facts))
    return text if facts.equal == facts.compared else f'<span class="bad">{text}</span>'
