"""Runs steps one by one, each in a process of its own; results are files, so that a second call continues."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stowage.flows.benchmarks.gpu.process import answer_of, run_process
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.files import locked, write_atomically
from stowage.stages.ir.table import read_record, write_record

Status = Literal["held", "fell", "timed out", "not run"]

PROCESS = (sys.executable, "-X", "faulthandler", "-m", "stowage.flows.benchmarks.gpu.step")
"""Command that runs a step: it is given a file with what is asked, and one to answer in."""

LEAST_S = 5.0
"""Seconds of the budget without which no step is started."""

EVERYTHING = "all"
NOT_ASKED = "not asked: no card"
"""Result of what only a card can answer, elsewhere."""


@dataclass(frozen=True)
class CommandStep:
    """One thing to find out.

    Attributes:
        name: the step's name.
        about: a line for people.
        limit_s: seconds that it may take.
        asked: the request to its process; a result counts for as long as this stays the same.
        besides: more of the request, without effect on the result.
        after: steps whose results it needs: where one of them is asked again, so is this; where one did not hold, this
            is
            not run.
    """

    name: str
    about: str
    limit_s: float
    asked: dict[str, Any] = field(default_factory=dict)
    besides: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()

    def digest(self, results: Mapping[str, StepResult]) -> str:
        """Return the digest of what is asked, and of the times of the steps before."""
        before = [results[name].when if name in results else "" for name in self.after]
        return hashlib.sha256(json.dumps([self.asked, before], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        step: the step's name.
        status: `held`: it ran, and what was expected is so; `fell`: it is not, or the process died; `timed out`: it
            took longer than its limit; `not run`: it could not be asked, and a second call asks again unless only a
            card
            can answer.
        why: one sentence about a step that did not hold.
        numbers: what it found.
        lines: sentences for people.
        log: the last lines that its process wrote, where it did not hold.
        seconds: seconds of the process.
        asked: digest of what it was asked.
        when: date and time in UTC.
    """

    step: str
    status: Status
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    seconds: float = 0.0
    asked: str = ""
    when: str = ""

    @property
    def finished(self) -> bool:
        """Return whether a second call leaves the result as it is."""
        return self.status != "not run" or self.why == NOT_ASKED


@dataclass(frozen=True)
class StepAnswer:
    """The answer of a step's process.

    Attributes:
        status: see `StepResult`.
        why: see `StepResult`.
        numbers: see `StepResult`.
        lines: see `StepResult`.
    """

    status: Status
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


Show = Callable[[Mapping[str, StepResult]], None]


@dataclass
class Runner:
    """Runs steps within a budget of time.

    Attributes:
        steps: all steps, in order.
        folder: folder of results and logs.
        say: receives what people should know.
        show: called with all results at the start and after every step.
    """

    steps: Sequence[CommandStep]
    folder: Path
    say: Callable[[str], None]
    show: Show

    def known(self) -> dict[str, StepResult]:
        """Return results of earlier calls that answer what is asked now."""
        found: dict[str, StepResult] = {}
        for step in self.steps:
            with contextlib.suppress(StowageError):  # no result, or a damaged one
                result = read_record(self._file(step, "json"), StepResult)
                if result.asked == step.digest(found):
                    found[step.name] = result
        return found

    def run(self, budget_s: float, *, again: Collection[str] = (), only: Collection[str] = ()) -> dict[str, StepResult]:
        """Run what is not finished, in order.

        Args:
            budget_s: seconds for all of them; the step under way is stopped at the end.
            again: names of steps to repeat, or `all`, or `fell` for those that did not hold.
            only: names of steps to run; by default all.

        Raises:
            ParameterError: there is no such step.
            StowageError: another call is at work in this folder.
        """
        self._check(again, only)
        end = time.monotonic() + budget_s
        with self._alone():
            results = self.known()
            self.show(results)
            for step in self.steps:
                if only and step.name not in only:
                    continue
                before = results.get(step.name)
                fresh = before is not None and before.asked == step.digest(results)
                if before is not None and fresh and before.finished and not _repeated(before, again):
                    self.say(f"{step.name}: {before.status}, as found before")
                    continue
                left = end - time.monotonic()
                if left < LEAST_S:
                    self.say(f"The {budget_s:.0f} s are used up before {step.name}: the same call again goes on there.")
                    break
                self.say(f"{step.name}: {step.about} …")
                results[step.name] = self._run(step, results, left)
                self.say(_said(results[step.name]))
                self.show(results)
        return results

    def _check(self, *named: Collection[str]) -> None:
        there = {step.name for step in self.steps}
        for name in (n for names in named for n in names):
            if name not in there and name not in (EVERYTHING, "fell"):
                raise ParameterError(f"There is no step '{name}': there are {', '.join(s.name for s in self.steps)}.")

    @contextlib.contextmanager
    def _alone(self) -> Any:
        from filelock import Timeout

        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / ".lock", timeout_s=0))
            except Timeout:
                raise StowageError(
                    f"Another call is at work in {self.folder}: wait for it, or give another --out."
                ) from None
            yield

    def _file(self, step: CommandStep, kind: str) -> Path:
        return self.folder / f"{1 + [*self.steps].index(step):02d}-{step.name}.{kind}"

    def _run(self, step: CommandStep, results: Mapping[str, StepResult], left_s: float) -> StepResult:
        missing = [name for name in step.after if name not in results or results[name].status != "held"]
        if missing:
            said = StepAnswer("not run", f"it goes on from {missing[0]}, which is: {_status(results, missing[0])}")
            return self._kept(step, results, said)
        limit_s, is_last = min(step.limit_s, left_s), left_s < step.limit_s
        request, answer, log = (self._file(step, kind) for kind in ("request", "answer", "log"))
        answer.unlink(missing_ok=True)
        write_atomically(request, json.dumps({"step": step.name, **step.asked, **step.besides}).encode())
        ended = run_process([*PROCESS, str(request), str(answer)], log, limit_s=limit_s)
        found = answer_of(answer)
        told = _answer(found) if found is not None else None
        if ended.code is None:
            why = ended.why() + (", where the time of the whole call ended" if is_last else "")
            said = StepAnswer("not run" if is_last else "timed out", why)
        elif ended.code != 0 or told is None:
            said = StepAnswer("fell", ended.why(), told.numbers if told else {}, told.lines if told else ())
        else:
            said = told
        for file in (request, answer):
            file.unlink(missing_ok=True)
        return self._kept(step, results, said, () if said.status == "held" else ended.lines, ended.seconds)

    def _kept(
        self,
        step: CommandStep,
        results: Mapping[str, StepResult],
        said: StepAnswer,
        log: tuple[str, ...] = (),
        seconds: float = 0.0,
    ) -> StepResult:
        """Write a step's result, and return it."""
        result = StepResult(
            step.name,
            said.status,
            said.why,
            said.numbers,
            said.lines,
            log,
            seconds,
            step.digest(results),
            _now(),
        )
        write_record(self._file(step, "json"), result)
        return result


def _status(results: Mapping[str, StepResult], name: str) -> str:
    return results[name].status if name in results else "not run"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _answer(found: Mapping[str, Any]) -> StepAnswer | None:
    try:
        return StepAnswer(found["status"], found["why"], found["numbers"], tuple(found["lines"]))
    except (KeyError, TypeError):
        return None


def _repeated(before: StepResult, again: Collection[str]) -> bool:
    did_not_hold = before.status in ("fell", "timed out")
    return before.step in again or EVERYTHING in again or (did_not_hold and "fell" in again)


def _said(result: StepResult) -> str:
    why = f": {result.why}" if result.why else ""
    return f"{result.step}: {result.status} in {result.seconds:.0f} s{why}"
