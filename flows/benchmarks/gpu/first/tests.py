"""Runs `tests/gpu` in this process, and counts what came of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, StepAnswer

TESTS = Path(__file__).resolve().parents[4] / "tests" / "gpu"

HUNG_S = 60
"""Seconds after which pytest prints where a test hangs."""


class _Counts:
    """A plugin of pytest: chooses tests of the device, and counts outcomes."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.outcomes: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        self.fallen: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out tests of another kind of device, and exhaustive ones."""
        left_out = [item for item in items if self._is_left_out(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    def _is_left_out(self, item: Any) -> bool:
        call = getattr(item, "callspec", None)
        device = call.params.get("device", self._device) if call is not None else self._device
        return device != self._device or item.get_closest_marker("long") is not None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the outcome of one phase of one test."""
        if report.failed:
            self.outcomes["failed"] += 1
            self.fallen.append(report.nodeid)
        elif report.skipped or report.when == "call":
            self.outcomes[report.outcome] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that could not be read."""
        if report.failed:
            self.outcomes["failed"] += 1
            self.fallen.append(report.nodeid)


def run(asked: dict[str, Any]) -> StepAnswer:
    """Run the files that are asked for."""
    files = [TESTS / name for name in asked["files"]]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        return StepAnswer("not run", f"{missing[0]} is not here: copy the whole repository")
    try:
        pytest: Any = importlib.import_module("pytest")
    except ImportError:
        return StepAnswer("not run", "pytest is not installed here")
    sys.path.insert(0, str(TESTS.parents[1]))
    counts = _Counts(asked["device"])
    words = [*map(str, files), "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", f"--confcutdir={TESTS}"]
    code = int(pytest.main([*words, f"-ofaulthandler_timeout={HUNG_S}", "--maxfail=20"], plugins=[counts]))
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.outcomes.items())
    numbers: dict[str, Any] = {**counts.outcomes, "fallen": counts.fallen}
    if counts.fallen or code not in (0, 5):
        first = counts.fallen[0] if counts.fallen else f"pytest ended with status {code}"
        return StepAnswer("fell", f"{text}; first: {first}", numbers)
    if not counts.outcomes["passed"]:
        return StepAnswer("not run", NOT_ASKED if asked["device"] != "cuda" else f"no test ran: {text}", numbers)
    return StepAnswer("held", numbers=numbers, lines=(text,))
