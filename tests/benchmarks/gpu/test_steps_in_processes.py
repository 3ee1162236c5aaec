"""Steps in processes of their own: what falls, hangs or is killed leaves the others, and a second call goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stowage.flows.benchmarks.gpu import steps as _gpu_steps
from stowage.flows.benchmarks.gpu.process import run_process
from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, CommandStep, Runner, StepResult
from stowage.flows.pipeline.project import import_path
from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.ir.table import read_record

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("a_step.py"))
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_steps, "PROCESS", (sys.executable, SCRIPT))
    monkeypatch.setenv("PYTHONPATH", str(import_path(ROOT)))


def a_step(name: str, does: str, tmp_path: Path, limit_s: float = 60.0, after: tuple[str, ...] = ()) -> CommandStep:
    return CommandStep(name, f"about {name}", limit_s, {"does": does, "runs": str(tmp_path / "runs")}, after=after)


def runner(tmp_path: Path, steps: Sequence[CommandStep]) -> Runner:
    return Runner(steps, tmp_path / "steps", lambda text: None, lambda results: None)


def runs(tmp_path: Path) -> list[str]:
    return [line.split()[0] for line in (tmp_path / "runs").read_text().splitlines()]


def process_of(tmp_path: Path, name: str) -> int:
    return next(int(n) for line in (tmp_path / "runs").read_text().splitlines() for w, n in [line.split()] if w == name)


def gone(number: int) -> bool:
    """Within some time."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # whoever adopts it has not looked yet
            return True
        time.sleep(0.02)
    return False


def test_what_falls_leaves_the_others(tmp_path: Path) -> None:
    kinds = ["fell", "raise", "crash", "half", "not run", "held", "die late"]
    shown: list[Mapping[str, StepResult]] = []
    steps = [a_step(f"s{i}", does, tmp_path) for i, does in enumerate(kinds)]
    found = Runner(steps, tmp_path / "steps", lambda text: None, lambda r: shown.append(dict(r))).run(60)
    assert [found[s.name].status for s in steps] == [*["fell"] * 4, "not run", "held", "fell"]
    assert [len(each) for each in shown] == [0, 1, 2, 3, 4, 5, 6, 7], "after every step"
    assert found["s0"].why == "it is not so"
    assert found["s1"].why == "ended with exit status 1: ValueError: it has a mistake"
    assert found["s2"].why.startswith("killed by SIGSEGV: ")
    assert any("main" in line for line in found["s2"].log), "faulthandler says where"
    assert "exit status 0" in found["s3"].why
    assert found["s6"].why.startswith("killed by SIGABRT: ")
    assert found["s6"].lines == ("a line",), "what it said before"
    assert "this is s1" in found["s1"].log
    assert found["s5"] == replace(found["s5"], why="", log=(), lines=("a line",), numbers={"told": 0})


def test_what_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    steps = [a_step("hangs", "hang", tmp_path, limit_s=1.5), a_step("next", "held", tmp_path)]
    found = runner(tmp_path, steps).run(600)
    assert (found["hangs"].status, found["next"].status) == ("timed out", "held")
    assert found["hangs"].why == f"stopped after {found['hangs'].seconds:.0f} s"
    assert found["hangs"].seconds < PATIENCE_S
    assert any("in hang_here" in line for line in found["hangs"].log), "it tells where"
    assert gone(process_of(tmp_path, "hangs"))
    assert gone(process_of(tmp_path, "child"))


def test_a_second_call_goes_on(tmp_path: Path) -> None:
    steps = [a_step("a", "held", tmp_path), a_step("b", "fell", tmp_path), a_step("c", "not run", tmp_path)]
    runner(tmp_path, steps).run(60)
    runner(tmp_path, steps).run(60)
    assert runs(tmp_path) == ["a", "b", "c", "c"], "what could not be asked is asked again, alone"
    runner(tmp_path, steps).run(60, again=["a"])
    assert runs(tmp_path)[4:] == ["a", "c"]
    runner(tmp_path, steps).run(60, again=["fell"])
    assert runs(tmp_path)[6:] == ["b", "c"]
    runner(tmp_path, steps).run(60, only=["b"], again=["all"])
    assert runs(tmp_path)[8:] == ["b"]
    changed = [replace(steps[0], asked=steps[0].asked | {"size": 2}), *steps[1:]]
    runner(tmp_path, changed).run(60, only=["a", "b"])
    assert runs(tmp_path)[9:] == ["a"], "it is asked something else now"
    told = [replace(steps[0], asked=changed[0].asked, besides={"besides": 7}), *steps[1:]]
    runner(tmp_path, told).run(60, only=["a"])
    assert runs(tmp_path)[10:] == [], "what a result does not depend on does not count"


def test_what_only_a_card_can_answer_is_not_asked_twice(tmp_path: Path) -> None:
    result = StepResult("a", "not run", NOT_ASKED)
    assert result.finished
    assert not replace(result, why="nothing was measured before").finished


def test_what_goes_on_from_a_repeated_step_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [a_step("a", "held", tmp_path), a_step("b", "held", tmp_path, after=("a",)), a_step("c", "held", tmp_path)]
    runner(tmp_path, steps).run(60)
    before = read_record(tmp_path / "steps" / "01-a.json", StepResult)
    monkeypatch.setattr(_gpu_steps, "_now", lambda: "another time")
    runner(tmp_path, steps).run(60, again=["a"])
    assert runs(tmp_path) == ["a", "b", "c", "a", "b"]
    assert before.when != "another time"


def test_what_goes_on_from_what_fell_is_not_run(tmp_path: Path) -> None:
    steps = [a_step("a", "fell", tmp_path), a_step("b", "held", tmp_path, after=("a",))]
    found = runner(tmp_path, steps).run(60)
    assert (found["b"].status, found["b"].why) == ("not run", "it goes on from a, which is: fell")
    assert runs(tmp_path) == ["a"]
    mended = [replace(steps[0], asked=steps[0].asked | {"does": "held"}), steps[1]]
    assert runner(tmp_path, mended).run(60)["b"].status == "held"


def test_the_budget_ends_the_call_and_not_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_steps, "LEAST_S", 0.1)
    steps = [a_step("a", "held", tmp_path), a_step("b", "hang", tmp_path), a_step("c", "held", tmp_path)]
    found = runner(tmp_path, steps).run(2.0)
    assert found["a"].status == "held"
    assert found["b"].status == "not run"
    assert "the time of the whole call ended" in found["b"].why
    assert "c" not in found
    finished = [steps[0], replace(steps[1], asked=steps[1].asked | {"does": "held"}), steps[2]]
    assert [r.status for r in runner(tmp_path, finished).run(60).values()] == ["held"] * 3
    assert [name for name in runs(tmp_path) if name != "child"] == ["a", "b", "b", "c"]


def test_a_killed_call_takes_its_step_with_it_and_goes_on(tmp_path: Path) -> None:
    steps = [a_step("a", "held", tmp_path), a_step("b", "hang", tmp_path), a_step("c", "held", tmp_path)]
    driver = (
        "import sys; from pathlib import Path; from stowage.flows.benchmarks.gpu import steps as s\n"
        f"s.PROCESS = (sys.executable, {SCRIPT!r})\n"
        f"steps = [s.CommandStep(n, '', 600, dict(does=d, runs={str(tmp_path / 'runs')!r})) for n, d in "
        "(('a', 'held'), ('b', 'hang'), ('c', 'held'))]\n"
        f"s.Runner(steps, Path({str(tmp_path / 'steps')!r}), print, lambda r: None).run(600)\n"
    )
    call = subprocess.Popen([sys.executable, "-c", driver])
    end = time.monotonic() + PATIENCE_S
    while not ((tmp_path / "runs").exists() and "child" in runs(tmp_path)):
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(StowageError, match="Another call is at work in"):
        runner(tmp_path, steps).run(60)
    call.send_signal(signal.SIGKILL)
    call.wait()
    assert gone(process_of(tmp_path, "b")), "nothing holds the card afterwards"
    finished = [steps[0], replace(steps[1], asked=steps[1].asked | {"does": "held"}), steps[2]]
    found = runner(tmp_path, finished).run(60)
    assert [r.status for r in found.values()] == ["held"] * 3
    assert [name for name in runs(tmp_path) if name != "child"] == ["a", "b", "b", "c"]
    os.kill(process_of(tmp_path, "child"), signal.SIGKILL)


def test_a_damaged_result_is_no_result(tmp_path: Path) -> None:
    steps = [a_step("a", "held", tmp_path)]
    runner(tmp_path, steps).run(60)
    (tmp_path / "steps" / "01-a.json").write_text('{"table": "StepRes')
    assert runner(tmp_path, steps).run(60)["a"].status == "held"
    assert runs(tmp_path) == ["a", "a"]


def test_a_step_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="There is no step 'z': there are a, b"):
        runner(tmp_path, [a_step("a", "held", tmp_path), a_step("b", "held", tmp_path)]).run(60, again=["z"])


def test_a_command_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, timeout: float | None = None) -> int:
        monkeypatch.undo()
        end = time.monotonic() + PATIENCE_S
        while not ((tmp_path / "runs").exists() and "x" in runs(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    code = f"""if True:
        import os, time
        print("x", os.getpid(), file=open({str(tmp_path / "runs")!r}, "w"), flush=True)
        time.sleep(600)"""
    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", code], tmp_path / "log", limit_s=60)
    assert gone(process_of(tmp_path, "x"))
