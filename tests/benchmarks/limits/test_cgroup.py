"""Memory limits of the kernel: version 1 and 2, found, set, judged and removed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stowage.flows.benchmarks.limits import cgroup
from stowage.flows.benchmarks.limits.cgroup import LimitedRun, run_limited, smallest_surviving_limit, why_no_limits
from stowage.stages.ir.errors import StowageError

MIB = 1 << 20
needs_limits = pytest.mark.skipif(bool(why_no_limits()), reason=why_no_limits() or "limits can be set")


def uses(mib: int) -> list[str]:
    """A command that fills so much memory."""
    return [sys.executable, "-c", f"data = b'x' * ({mib} << 20); print(len(data) >> 20)"]


@needs_limits
def test_a_command_that_fits() -> None:
    ended = run_limited(uses(50), 200 * MIB)
    assert (ended.survived, ended.killed, ended.returncode, ended.output) == (True, False, 0, "50\n")
    assert ended.limit_bytes == 200 * MIB
    if ended.peak_bytes:
        assert 50 * MIB < ended.peak_bytes < 150 * MIB


@needs_limits
def test_a_command_that_does_not() -> None:
    ended = run_limited(uses(300), 100 * MIB)
    assert ended.killed
    assert not ended.survived
    assert ended.returncode != 0


@needs_limits
def test_a_child_that_does_not() -> None:
    """The command lives on, its child does not."""
    child = f"import subprocess, sys; print(subprocess.run({uses(300)}).returncode)"
    ended = run_limited([sys.executable, "-c", child], 100 * MIB)
    assert ended.killed
    assert not ended.survived


@needs_limits
def test_what_the_command_sees(tmp_path: Path) -> None:
    ended = run_limited(
        [sys.executable, "-c", "import os; print(os.environ['A'], os.getcwd()); raise SystemExit(3)"],
        200 * MIB,
        environment={"A": "b c"},
        folder=tmp_path,
    )
    assert ended.output == f"b c {tmp_path}\n"
    assert (ended.returncode, ended.killed, ended.survived) == (3, False, False)


@needs_limits
def test_time_and_cgroups_that_are_left() -> None:
    ended = run_limited(["sh", "-c", "sleep 60 & sleep 60"], 100 * MIB, timeout_s=0.3)
    assert ended.timed_out
    assert not ended.survived
    assert ended.elapsed_s < 30
    controller, _ = cgroup._find(cgroup.PROC)
    assert controller is not None
    assert list(controller.parent.glob(f"stowage-{os.getpid()}-*")) == []


@needs_limits
def test_the_smallest_limit_of_a_real_command() -> None:
    found = smallest_surviving_limit(lambda limit: run_limited(uses(150), limit), 0, 400 * MIB, 25 * MIB)
    assert 150 * MIB < found.limit_bytes < 250 * MIB
    assert 0 < found.limit_bytes - found.killed_bytes <= 25 * MIB
    assert any(run.killed for run in found.runs)


def needs(nbytes: int, otherwise: LimitedRun | None = None) -> Callable[[int], LimitedRun]:
    def run(limit: int) -> LimitedRun:
        enough = limit >= nbytes
        if not enough and otherwise is not None:
            return otherwise
        return LimitedRun(limit, not enough, False, 0 if enough else -9, 0, 0.0, "")

    return run


@pytest.mark.parametrize("nbytes", [1, 17, 500, 999, 1000])
def test_bisection(nbytes: int) -> None:
    found = smallest_surviving_limit(needs(nbytes), 0, 1000, 1)
    assert (found.limit_bytes, found.killed_bytes) == (nbytes, nbytes - 1)
    coarse = smallest_surviving_limit(needs(nbytes), 0, 1000, 100)
    assert coarse.killed_bytes < nbytes <= coarse.limit_bytes <= coarse.killed_bytes + 100
    assert len(coarse.runs) <= 6


def test_bisection_that_has_no_answer() -> None:
    with pytest.raises(StowageError, match="does not survive under"):
        smallest_surviving_limit(needs(2000), 0, 1000, 1)
    broken = LimitedRun(500, False, False, 1, 0, 0.0, "Traceback\nModuleNotFoundError: no module\n")
    with pytest.raises(StowageError, match="not for memory: ModuleNotFoundError"):
        smallest_surviving_limit(needs(900, broken), 0, 1000, 1)
    late = LimitedRun(500, False, True, -9, 0, 0.0, "")
    assert smallest_surviving_limit(needs(900, late), 0, 1000, 1).limit_bytes == 900


def machine(folder: Path, own: dict[str, str], mounts: list[str]) -> Path:
    """A `/proc/self` that says which cgroups there are."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("".join(f"{key}:{path}\n" for key, path in own.items()))
    (proc / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return proc


def test_version_2_is_found_and_switched_on(tmp_path: Path) -> None:
    """Folders in the kernel's place: the process's own group has no memory controller, its parent does."""
    root = tmp_path / "sys"
    own = root / "user" / "session"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu\n")
    (own / "cgroup.subtree_control").write_text("")
    (root / "user" / "cgroup.controllers").write_text("cpu memory\n")
    (root / "user" / "cgroup.subtree_control").write_text("cpu\n")
    proc = machine(tmp_path, {"0:": "/user/session"}, [f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw"])
    controllers = []
    original = cgroup._Controller._remove

    def remove(self: cgroup._Controller, path: Path) -> None:
        controllers.append((self.version, path.parent, (path / "memory.max").read_text()))
        (path / "memory.max").unlink()
        original(self, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cgroup._Controller, "_remove", remove)
        found, why = cgroup._find(proc)
    assert why == ""
    assert found is not None
    assert (found.version, found.parent) == (2, root / "user")
    assert (root / "user" / "cgroup.subtree_control").read_text() == "+memory"
    assert controllers == [(2, root / "user", str(1 << 30))]


def test_version_2_in_full(tmp_path: Path) -> None:
    controller = cgroup._Controller(2, tmp_path)
    group = tmp_path / "group"
    group.mkdir()
    for name in ("memory.swap.max", "memory.oom.group"):
        (group / name).write_text("")
    controller._limit(group, 12345)
    read = {path.name: path.read_text() for path in group.iterdir()}
    assert read == {"memory.max": "12345", "memory.swap.max": "0", "memory.oom.group": "1"}
    (group / "memory.peak").write_text("777\n")
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert (controller.peak_bytes(group), controller.kills(group)) == (777, 2)


def test_version_1_in_full(tmp_path: Path) -> None:
    controller = cgroup._Controller(1, tmp_path)
    assert controller.peak_bytes(tmp_path) == 0
    assert controller.kills(tmp_path) == 0
    for name in ("memory.memsw.limit_in_bytes", "memory.swappiness"):
        (tmp_path / name).write_text("")
    controller._limit(tmp_path, 999)
    read = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert read == {
        "memory.limit_in_bytes": "999",
        "memory.memsw.limit_in_bytes": "999",
        "memory.swappiness": "0",
    }
    (tmp_path / "memory.max_usage_in_bytes").write_text("888\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert (controller.peak_bytes(tmp_path), controller.kills(tmp_path)) == (888, 1)


def test_why_there_are_no_limits(tmp_path: Path) -> None:
    nothing = machine(tmp_path, {}, [])
    assert why_no_limits(nothing) == "No memory cgroup can be made on this machine: no memory controller is mounted."
    other = tmp_path / "other"
    other.mkdir()
    root = tmp_path / "sys"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu\n")
    mounts = [f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw", f"31 20 0:27 / {root}/v1 rw - cgroup cgroup rw,memory"]
    proc = machine(other, {"0:": "/", "4:memory": "/process"}, mounts)
    sentence = why_no_limits(proc)
    assert f"{root} has no memory controller (v2)" in sentence
    assert f"{root}/v1: No such file or directory (v1)" in sentence


def test_nothing_runs_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "PROC", Path("/nonexistent"))
    with pytest.raises(StowageError, match="No memory cgroup"):
        run_limited(["true"], 1 << 30)
