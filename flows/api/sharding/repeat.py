"""Writes the rows of all blocks of a model from those of a few that were traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stowage.stages.ir.parallel import ParameterGroup
from stowage.stages.workload.repeated import Repeated


def repeat_rows(
    rows: Sequence[ParameterGroup], lists: Sequence[Repeated], kept: Mapping[str, int]
) -> list[ParameterGroup]:
    """Return the rows of the whole model.

    Args:
        rows: rows of the model with the first blocks of each list alone.
        lists: the repeated lists.
        kept: path of a list -> number of blocks that were traced.
    """
    found: list[tuple[ParameterGroup, int]] = []
    by_block = {(lst.path, i): row for row in rows for lst in lists if (i := _block(row, lst.path)) is not None}
    done: set[str] = set()
    for row in rows:
        home = next((lst for lst in lists if _block(row, lst.path) is not None), None)
        if home is None:
            found.append((row, -1))
            continue
        if home.path in done:
            continue
        done.add(home.path)
        for index in range(home.length):
            source = home.source(index, kept[home.path])
            if (home.path, source) in by_block:
                found.append((_renamed(by_block[home.path, source], home.path, source, index), index))
    segments: dict[tuple[int, int], int] = {}
    late = sorted((row.after_root, number) for number, (row, _) in enumerate(found) if row.after_root)
    turns = {number: turn for turn, (_, number) in enumerate(late, start=1)}
    return [
        replace(
            row,
            group=number,
            after_root=turns.get(number, 0),
            segment=segments.setdefault((row.segment, index), len(segments)) if row.segment >= 0 else -1,
        )
        for number, (row, index) in enumerate(found)
    ]


def _block(row: ParameterGroup, path: str) -> int | None:
    """Return the number of the block of a list that a row is; None if it is none."""
    module = row.modules[0]
    name = module.removeprefix(f"{path}.")
    return int(name) if module.startswith(f"{path}.") and name.isdigit() else None


def _renamed(row: ParameterGroup, path: str, source: int, index: int) -> ParameterGroup:
    old, new = f"{path}.{source}", f"{path}.{index}"
    return replace(
        row,
        modules=tuple(new + m.removeprefix(old) for m in row.modules),
        parameters=tuple(new + n.removeprefix(old) for n in row.parameters),
    )
