"""Budgets that planning finds, and what `auto` stands for under faked control groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stowage.stages.ir.errors import MIB, Infeasible, ParameterError
from stowage.stages.settings import parse_settings
from stowage.stages.settings.budgets import check_budget, parse_slowdown
from stowage.stages.solve.free import Free, auto_budget, free_on_gpu, free_ram
from stowage.stages.solve.goals import least
from stowage.stages.solve.summary import Solved

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("900MiB", "size"),
        (5, "size"),
        ("50%", "share"),
        (" auto ", "auto"),
        ("smallest", "smallest"),
        ("+5%", "slowdown"),
        ("+0%", "slowdown"),
    ],
)
def test_kinds_of_budgets(text: str | int, kind: str) -> None:
    assert check_budget(text) == kind


def test_a_slowdown_is_a_fraction() -> None:
    assert parse_slowdown("+5%") == 0.05
    assert parse_slowdown("+0%") == parse_slowdown("+0.0%") == 0.0


@pytest.mark.parametrize(
    "text", ["+5", "+%", "+x%", "+-5%", "5%5%", "autos", "least", "", "0%", "-1MiB", 0, "smallest!"]
)
def test_what_is_no_budget_is_one_sentence(text: str | int) -> None:
    with pytest.raises(ParameterError) as caught:
        check_budget(text, "solve.device_budget")
    said = str(caught.value)
    assert said.startswith("solve.device_budget is ")
    assert said.endswith(".")
    assert "\n" not in said


@pytest.mark.parametrize("budget", ["auto", "smallest", "+5%"])
def test_parameters_take_them(budget: str) -> None:
    model = {"architecture": "gpt2"}
    assert parse_settings({"trace": {"model": model}, "solve": {"device_budget": budget}}).solve.device_budget == budget
    with pytest.raises(ParameterError, match=r"solve.device_budget: '\+5' is not a budget: write .*'auto'"):
        parse_settings({"trace": {"model": model}, "solve": {"device_budget": "+5"}})


def _machine(root: Path, *, available: int, groups: str = "", mounts: str = "") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts)


def _group_2(folder: Path, limit: int | None, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{'max' if limit is None else limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 7\n")


def _group_1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {cached}\n")


MOUNT_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
MOUNT_1 = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_without_control_groups_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    _machine(tmp_path, available=8 * GIB)
    assert free_ram(tmp_path) == Free(8 * GIB, "this machine")


def test_a_control_group_of_version_2_admits_its_limit_and_counts_caches_as_free(tmp_path: Path) -> None:
    _machine(tmp_path, available=8 * GIB, groups="0::/jobs/mine\n", mounts=MOUNT_2)
    _group_2(tmp_path / "sys/fs/cgroup/jobs/mine", limit=4 * GIB, used=3 * GIB, cached=GIB // 2)
    _group_2(tmp_path / "sys/fs/cgroup/jobs", limit=None, used=3 * GIB)
    assert free_ram(tmp_path) == Free(3 * GIB // 2, "the cgroup /jobs/mine")


def test_the_limit_of_a_group_above_counts_too(tmp_path: Path) -> None:
    _machine(tmp_path, available=8 * GIB, groups="0::/jobs/mine\n", mounts=MOUNT_2)
    _group_2(tmp_path / "sys/fs/cgroup/jobs/mine", limit=None, used=GIB)
    _group_2(tmp_path / "sys/fs/cgroup/jobs", limit=2 * GIB, used=GIB)
    assert free_ram(tmp_path) == Free(GIB, "the cgroup /jobs")


@pytest.mark.parametrize("inside", ["/", "/docker/4479"])
def test_a_control_group_of_version_1_is_found_in_containers_too(tmp_path: Path, inside: str) -> None:
    groups = "9:name=systemd:/\n4:cpu,memory:/docker/4479\n0::/\n"
    _machine(tmp_path, available=8 * GIB, groups=groups, mounts=MOUNT_1.format(inside))
    lower_tier = "docker/4479" if inside == "/" else ""
    _group_1(tmp_path / "sys/fs/cgroup/memory" / lower_tier, limit=3 * GIB, used=GIB, cached=GIB // 4)
    assert free_ram(tmp_path).nbytes == 2 * GIB + GIB // 4


def test_a_group_of_version_1_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    _machine(tmp_path, available=8 * GIB, groups="4:memory:/mine\n", mounts=MOUNT_1.format("/"))
    _group_1(tmp_path / "sys/fs/cgroup/memory/mine", limit=9223372036854771712, used=GIB)
    assert free_ram(tmp_path) == Free(8 * GIB, "this machine")


def test_a_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    _machine(tmp_path, available=8 * GIB, groups="0::/mine\n", mounts=MOUNT_2)
    _group_2(tmp_path / "sys/fs/cgroup/mine", limit=GIB, used=GIB + 4096)
    with pytest.raises(ParameterError, match=r"finds no memory .*the cgroup /mine"):
        auto_budget(free_ram(tmp_path))


def test_a_system_that_does_not_say_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot tell how much memory is free"):
        free_ram(tmp_path)


def test_the_reserve_is_stated_and_what_the_model_holds_counts() -> None:
    found = auto_budget(Free(10 * GIB, "the cgroup /job"), retained_bytes=GIB)
    assert found.nbytes == 10 * GIB + GIB - int(0.05 * 10 * GIB)
    assert re.fullmatch(
        r"10,240\.0 MiB free on the cgroup /job and 1,024\.0 MiB that the model has already, less a reserve of "
        r"512\.0 MiB",
        found.said,
    )
    assert auto_budget(Free(GIB, "x")).nbytes == GIB - 256 * MIB, "never less than so much"


def test_a_gpu_that_is_not_here_has_nothing_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 70000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert free_on_gpu("NVIDIA H100 80GB HBM3, 132 SMs") == Free(70000 * MIB, "NVIDIA H100 80GB HBM3")
    with pytest.raises(ParameterError, match="asks what is free on NVIDIA A100"):
        free_on_gpu("NVIDIA A100")


Solve = Callable[[int], float]


class _Curve:
    """A step whose time is a function of the budget, for the search alone; it counts what it is asked."""

    def __init__(self, least: int, time_of: Solve, top: int) -> None:
        self.least, self.time_of, self.top, self.asked = least, time_of, top, 0

    def __call__(self, nbytes: int) -> object:
        self.asked += 1
        if nbytes < self.least:
            raise Infeasible(nbytes, self.least, "a block, forward")
        return _Solved(_Summary(self.time_of(nbytes)))


class _Summary:
    def __init__(self, step_time_s: float) -> None:
        self.step_time_s = step_time_s


class _Solved:
    def __init__(self, summary: _Summary) -> None:
        self.summary = summary


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.05, 0.5, 3.0])
def test_a_notch_less_than_the_least_at_a_slowdown_is_slower(slowdown: float) -> None:
    from stowage.stages.solve.goals import NOTCHES, Kept, least, least_at

    curve = _Curve(1000, lambda nbytes: 1 + (5000 - min(nbytes, 5000)) / 2000, 5000)
    found = least_at(slowdown, curve, Kept(5000, 1.0))  # type: ignore[arg-type]
    notch = -(-4000 // NOTCHES)
    assert curve.time_of(found.nbytes) <= 1 + slowdown
    assert found.nbytes - notch < 1000 or curve.time_of(found.nbytes - notch) > 1 + slowdown
    assert curve.asked < 20, "by bisection"
    assert f"{100 * slowdown:g}% longer" in found.said
    assert least(curve) == 1000  # type: ignore[arg-type]


def test_a_slowdown_that_no_plan_keeps_to_is_one_sentence() -> None:
    from stowage.stages.solve.goals import Kept, least_at

    with pytest.raises(ParameterError, match=r"device_budget '\+5%' cannot be met"):
        least_at(0.05, _Curve(1000, lambda nbytes: 2.0, 5000), Kept(5000, 1.0))  # type: ignore[arg-type]


def _planner(least_bytes: int, said_bytes: int, asked: list[int]) -> Callable[[int], Solved]:
    """Has plans from `least_bytes` on, which take somewhat less than they may, and says of failures `said_bytes`."""

    def solve(nbytes: int) -> Solved:
        asked.append(nbytes)
        if nbytes < least_bytes:
            raise Infeasible(nbytes, said_bytes, "somewhere")
        peak_bytes = max(least_bytes, nbytes - 100)
        summary: Any = SimpleNamespace(device_peak_bytes=peak_bytes, smallest_feasible_bytes=peak_bytes)
        return Solved([], summary)

    return solve


@pytest.mark.parametrize(("of_solve", "of_quick"), [(1000, 1000), (700, 1000), (1000, 990)])
def test_the_least_memory_is_that_of_the_plans_that_will_be_used(of_solve: int, of_quick: int) -> None:
    """The quick search may know no plan for what suffices in truth, and one for what does not."""
    asked: list[int] = []
    quick = _planner(of_quick, of_quick, [])
    assert least(_planner(of_solve, of_solve, asked), quick) == of_solve
    assert len(asked) <= 8
