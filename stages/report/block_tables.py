"""Writes, block by block, what the plan does with forward results, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from stowage.stages.ir.plan import Option
from stowage.stages.report.activations import FATES, MEANING, BlockFates, Treatment, totals, treatments
from stowage.stages.report.figures import FATE_COLOURS
from stowage.stages.report.units import NOTHING, percent, ranges, seconds, size


def fate_legend(fates: Sequence[BlockFates]) -> str:
    """Return the legend of fates, with the bytes of each."""
    nbytes = totals(fates)
    items = "".join(
        f'<li><span class="key" style="background:{FATE_COLOURS[f]}"></span><b>{f}</b> '
        f"({size(nbytes[f])}): {MEANING[f]}</li>"
        for f in FATES
    )
    return f'<p>Every storage that forward creates, once each:</p><ul class="legend">{items}</ul>'


def treatment_table(fates: Sequence[BlockFates], options: Sequence[Option]) -> str:
    """Return the table of blocks, in which identical blocks that are treated alike share a row, and its details."""
    considered: dict[str, list[Option]] = {}
    for option in options:
        considered.setdefault(option.block_hash, []).append(option)
    groups = treatments(fates)
    rows = "".join(_treatment_row(group, considered) for group in groups)
    head = "".join(f'<th class="n">{name}</th>' for name in (*FATES, "forward", "recompute", "backward"))
    shown: set[str] = set()
    details = []
    for group in groups:
        details.append(_result_details(group))
        first = group.blocks[0].block_hash
        if first in considered and first not in shown:
            shown.add(first)
            details.append(_option_details(first, considered[first]))
    return (
        "<p>Identical blocks that the plan treats alike share a row; bytes and times are of one of them.</p>"
        f'<div class="scroll"><table><thead><tr><th>blocks</th><th>steps</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{''.join(details)}"
    )


def _names(group: Treatment) -> str:
    numbers = [n for n in group.numbers if n >= 0]
    return ranges(numbers) if numbers else "shared"


def _modules(group: Treatment) -> str:
    """Return the modules that these blocks are, where they are known."""
    named = [b.module or b.label for b in group.blocks]
    return named[0] if len(named) == 1 or named[0] == named[-1] else f"{named[0]}, …, {named[-1]}"


def _treatment_row(group: Treatment, considered: Mapping[str, Sequence[Option]]) -> str:
    one = group.blocks[0]
    cells = [size(one.nbytes(f) or None) for f in FATES]
    cells += [seconds(t) if t else NOTHING for t in (one.forward_s, one.recompute_s, one.backward_s)]
    count = len(considered.get(one.block_hash, ()))
    options = f'<div class="quiet">{count} options considered</div>' if count else ""
    return (
        f'<tr><td class="main">{_names(group)}<div class="quiet">{escape(_modules(group))}</div></td>'
        f"<td>{escape(', '.join(one.steps)) or NOTHING}{options}</td>"
        + "".join(f'<td class="n">{cell}</td>' for cell in cells)
        + "</tr>"
    )


def _result_details(group: Treatment) -> str:
    one = group.blocks[0]
    rows = "".join(
        f'<tr><td><span class="key" style="background:{FATE_COLOURS[r.fate]}"></span>{r.fate}</td>'
        f'<td class="n">{size(r.nbytes)}</td><td><code>{escape(r.name)}</code></td>'
        f"<td><code>{escape(r.node)}</code></td><td><code>{escape(r.module)}</code></td></tr>"
        for r in one.results
    )
    head = '<tr><th>what happens</th><th class="n">bytes</th><th>storage</th><th>made by</th><th>in module</th></tr>'
    block = f"block hash <code>{escape(one.block_hash)}</code>" if one.block_hash else ""
    return (
        f"<details><summary>Forward results of {_heading(group)}</summary><p class='quiet'>{block}</p>"
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></details>"
    )


def _heading(group: Treatment) -> str:
    names = _names(group)
    if names == "shared":
        return "nodes outside the chain"
    return f"block{'s' if len(group.blocks) > 1 else ''} {names}"


def _option_details(block_hash: str, options: Sequence[Option]) -> str:
    names = ("option", "forward", "backward", "saved", "forward peak", "backward peak", "recomputed", "found by")
    head = "".join(f'<th class="n">{n}</th>' for n in names[:-1]) + f"<th>{names[-1]}</th>"
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{cell}</td>'
            for cell in (
                str(o.option),
                seconds(o.forward_time_s),
                seconds(o.backward_time_s),
                size(o.save_bytes),
                size(o.forward_peak_bytes),
                size(o.backward_peak_bytes),
                size(o.recomputed_bytes),
            )
        )
        + f"<td>{escape(o.formulation)}, {escape(o.status)}{f', gap {percent(o.gap)}' if o.gap else ''}</td></tr>"
        for o in sorted(options, key=lambda o: o.option)
    )
    return (
        f"<details><summary>Options of block hash <code>{escape(block_hash)}</code></summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )
