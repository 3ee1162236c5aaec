"""Writes what changed between two plans as Markdown; it reads and writes no files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import polars as pl

from stowage.flows.benchmarks.markdown import markdown
from stowage.flows.comparison.two_plans import Side
from stowage.stages.ir.errors import size_text

_SHOWN = 4
"""Most operations of a block that are listed."""


@dataclass(frozen=True)
class BlockChange:
    """The change of one block's treatment. Operations are counted by name; numbers in names are `*`.

    Attributes:
        fate: `same`, `changed`, `new` or `gone`.
        recomputed: operations that the plan before kept and the plan after makes again.
        kept: operations that the plan before made again and the plan after keeps.
        recomputed_bytes: bytes that the recomputed operations create.
        kept_bytes: bytes that the kept operations create.
    """

    fate: str
    recomputed: tuple[tuple[str, int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    recomputed_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class _Treatment:
    operations: Counter[str]
    recomputed: Counter[str]
    nbytes: Mapping[str, int]


def compare(before: Side, after: Side) -> list[tuple[BlockChange, list[str]]]:
    """Return the changes of blocks, with the labels of the blocks that changed in that way, in the chain's order."""
    pairs = _pairs(before, after)
    groups: dict[BlockChange, list[str]] = defaultdict(list)
    old, new = _treatments(before), _treatments(after)
    for label, a, b in pairs:
        groups[_change(old.get(a), new.get(b))].append(label)
    return list(groups.items())


def render(before: Side | None, after: Side, before_name: str) -> str:
    """Return the report of a comparison; without a plan before, only the plan after."""
    lines = ["## Plan", ""]
    if before is None:
        lines += [f"There is no plan at `{before_name}` to compare with.", ""]
    lines += _totals(before, after)
    if before is None:
        return "\n".join(lines) + "\n"
    if before.meta.configuration_hash == after.meta.configuration_hash:
        lines += ["", "The trace is unchanged."]
    else:
        lines += ["", f"**The trace changed**: {before.meta.model} → {after.meta.model}, {_parameters(before, after)}."]
    changes = [(_labels(labels), *_cells(change)) for change, labels in compare(before, after)]
    table = pl.DataFrame(
        changes, schema=dict.fromkeys(("blocks", "now recomputed", "now kept"), pl.String), orient="row"
    )
    return "\n".join([*lines, "", "### Blocks", "", markdown(table)]) + "\n"


def _totals(before: Side | None, after: Side) -> list[str]:
    b, a = before.summary if before else None, after.summary
    rows: list[tuple[str, float | None, float, str]] = [
        ("predicted step", b.step_time_s if b else None, a.step_time_s, "s"),
        ("predicted peak", b.device_peak_bytes if b else None, a.device_peak_bytes, "B"),
        ("budget", b.device_budget_bytes if b else None, a.device_budget_bytes, "B"),
        ("step without recomputation", b.keep_all_time_s if b else None, a.keep_all_time_s, "s"),
        ("peak without recomputation", b.keep_all_peak_bytes if b else None, a.keep_all_peak_bytes, "B"),
    ]
    cells = [
        (name, _quantity(old, unit), _quantity(new, unit), f"{new / old:.3f}" if old else "—")
        for name, old, new, unit in rows
    ]
    cells += [
        ("method", f"{b.method}, {b.status}" if b else "—", f"{a.method}, {a.status}", ""),
        ("device", b.device if b else "—", a.device, ""),
    ]
    table = pl.DataFrame(cells, schema=dict.fromkeys(("what", "before", "after", "ratio"), pl.String), orient="row")
    return [markdown(table, headings={"what": ""}, right=("before", "after", "ratio"))]


def _pairs(before: Side, after: Side) -> list[tuple[str, int, int]]:
    """Return (label, block before, block after), -1 where it is missing.

    Blocks are paired by position in chains of one length, else by label.
    """
    if len(before.blocks) == len(after.blocks):
        return [(b.label, a.block, b.block) for a, b in zip(before.blocks, after.blocks)]
    old = {b.label: b.block for b in before.blocks}
    new = {b.label for b in after.blocks}
    gone = [(b.label, b.block, -1) for b in before.blocks if b.label not in new]
    return [(b.label, old.get(b.label, -1), b.block) for b in after.blocks] + gone


def _treatments(side: Side) -> dict[int, _Treatment]:
    again = {row.node for row in side.rows if row.action == "compute" and row.recompute}
    operations: dict[int, Counter[str]] = defaultdict(Counter)
    recomputed: dict[int, Counter[str]] = defaultdict(Counter)
    nbytes: dict[int, dict[str, int]] = defaultdict(dict)
    for node in side.nodes:
        name = re.sub(r"\d+", "*", node.name)
        operations[node.block][name] += 1
        recomputed[node.block][name] += node.node in again
        nbytes[node.block][name] = sum(side.storages[s].nbytes for s in node.creates)
    return {
        block.block: _Treatment(operations[block.block], recomputed[block.block], nbytes[block.block])
        for block in side.blocks
    }


def _change(before: _Treatment | None, after: _Treatment | None) -> BlockChange:
    if before is None or after is None:
        return BlockChange("new" if before is None else "gone")
    both = before.operations & after.operations
    again = Counter({n: c for n, c in (after.recomputed - before.recomputed).items() if n in both})
    kept = Counter({n: c for n, c in (before.recomputed - after.recomputed).items() if n in both})
    if not (again or kept):
        return BlockChange("same")
    return BlockChange(
        "changed",
        recomputed=tuple(sorted(again.items())),
        kept=tuple(sorted(kept.items())),
        recomputed_bytes=sum(after.nbytes[n] * c for n, c in again.items()),
        kept_bytes=sum(after.nbytes[n] * c for n, c in kept.items()),
    )


def _cells(change: BlockChange) -> tuple[str, str]:
    if change.fate != "changed":
        words = {"same": "as before", "new": "new block", "gone": "no longer there"}[change.fate]
        return words, words
    return _operations(change.recomputed, change.recomputed_bytes), _operations(change.kept, change.kept_bytes)


def _operations(named: Iterable[tuple[str, int]], nbytes: int) -> str:
    listed = [f"`{name}` ×{count}" if count > 1 else f"`{name}`" for name, count in named]
    if not listed:
        return "—"
    more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{size_text(nbytes)} a block: {', '.join(listed[:_SHOWN])}{more}"


def _labels(labels: list[str]) -> str:
    if len(labels) <= 2:
        return ", ".join(f"`{label}`" for label in labels)
    return f"{len(labels)} blocks: `{labels[0]}`, …, `{labels[-1]}`"


def _parameters(before: Side, after: Side) -> str:
    return f"{before.meta.parameters:,} → {after.meta.parameters:,} parameters"


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    return size_text(int(value)) if unit == "B" else f"{value:.4f} s"
