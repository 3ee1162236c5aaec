"""Keeps results of a long run one by one, so that a run that is cut off goes on where it was.

Results are kept by the code that made them: where it has changed, they are made again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stowage.flows.planning.plan_store import code_of_plans
from stowage.stages.ir.code import code_hash
from stowage.stages.ir.files import write_atomically

MAKERS = tuple(
    f"stowage.flows.benchmarks.elixir.{name}"
    for name in (
        *("engines", "machines", "models", "rows"),
        *("group_plans", "plan_b", "plan_cells", "rank_time", "sharded_machine", "sharded_step"),
    )
)
"""Modules that decide what is in a result, besides those that plan."""


class Kept:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._code = [*code_of_plans(), code_hash(*MAKERS)]

    def find(self, *words: object) -> dict[str, Any] | None:
        """Return the result with a name, if there is one by the same code."""
        path = self._path(words)
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if found.pop("code") == self._code else None

    def keep(self, result: Mapping[str, Any], *words: object) -> None:
        """Keep a result under a name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"code": self._code, **result}, indent=1) + "\n"
        write_atomically(self._path(words), text.encode())

    def _path(self, words: tuple[object, ...]) -> Path:
        name = "-".join(str(word) for word in words)
        return self._folder / f"{''.join(x if x.isalnum() else '-' for x in name)}.json"
