"""Runs a command under a memory limit of the kernel, which counts all memory that a process occupies.

It works with cgroup v1 (`memory.limit_in_bytes`) and v2 (`memory.max`). A cgroup is made in the process's own, or in
the
closest parent that allows it, and removed afterwards. What is counted: the memory of all processes of the command,
their page cache and the kernel's for them. Swap is switched off for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.ir.errors import StowageError, size_text

PROC = Path("/proc/self")
_numbers = itertools.count()


@dataclass(frozen=True)
class LimitedRun:
    """A command that has ended.

    Attributes:
        limit_bytes: the limit it was given.
        killed: the kernel killed it for memory.
        timed_out: we ended it after its time.
        returncode: return code of the command; negative for a signal.
        peak_bytes: highest memory that was charged to it; 0 where the kernel does not say.
        elapsed_s: wall time.
        output: what it printed, both streams.
    """

    limit_bytes: int
    killed: bool
    timed_out: bool
    returncode: int
    peak_bytes: int
    elapsed_s: float
    output: str

    @property
    def survived(self) -> bool:
        """Return whether it ended by itself and well."""
        return not self.killed and not self.timed_out and self.returncode == 0


class _Controller:
    """The place where limits can be set: version 1 or 2, and the folder in which a cgroup may be made."""

    def __init__(self, version: int, parent: Path) -> None:
        self.version, self.parent = version, parent

    @contextlib.contextmanager
    def group(self, limit_bytes: int) -> Iterator[Path]:
        """Make a cgroup with a limit, and remove it at the end."""
        path = self.parent / f"stowage-{os.getpid()}-{next(_numbers)}"
        path.mkdir()
        try:
            self._limit(path, limit_bytes)
            yield path
        finally:
            self._remove(path)

    def _limit(self, path: Path, limit_bytes: int) -> None:
        if self.version == 1:
            _write(path / "memory.limit_in_bytes", limit_bytes)
            for name, value in (("memory.memsw.limit_in_bytes", limit_bytes), ("memory.swappiness", 0)):
                if (path / name).exists():
                    with contextlib.suppress(OSError):
                        _write(path / name, value)
        else:
            _write(path / "memory.max", limit_bytes)
            for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
                if (path / name).exists():
                    _write(path / name, value)

    def _remove(self, path: Path) -> None:
        """Remove a cgroup; the kernel may need a moment after its last process has ended."""
        for _ in range(200):
            for process in _read(path / "cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(process), signal.SIGKILL)
            try:
                path.rmdir()
                return
            except OSError:
                time.sleep(0.01)

    def peak_bytes(self, path: Path) -> int:
        """Return the highest memory charged."""
        return int(_read(path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")) or 0)

    def kills(self, path: Path) -> int:
        """Return how many processes the kernel has killed for memory."""
        lines = _read(path / ("memory.oom_control" if self.version == 1 else "memory.events")).splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _write(path: Path, value: object) -> None:
    path.write_text(str(value))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _hierarchies(proc: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield (version, mount, the process's own cgroup) of each hierarchy that could have the memory controller."""
    own: dict[str, str] = {}
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own["unified" if not controllers else "memory" if "memory" in controllers.split(",") else ""] = path
    for line in _read(proc / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            version, path = 1, own["memory"]
        elif kind == "cgroup2" and "unified" in own:
            version, path = 2, own["unified"]
        else:
            continue
        inside = os.path.relpath(path, root) if path.startswith(root.rstrip("/") + "/") else "."
        folder = Path(mount) / inside
        yield version, Path(mount), folder if folder.is_dir() else Path(mount)


def _usable(version: int, parent: Path) -> str:
    """Say why no limited cgroup can be made in `parent`; empty where it can."""
    try:
        if version == 2 and "memory" not in _read(parent / "cgroup.subtree_control").split():
            if "memory" not in _read(parent / "cgroup.controllers").split():
                return f"{parent} has no memory controller"
            _write(parent / "cgroup.subtree_control", "+memory")
        probe = _Controller(version, parent)
        with probe.group(1 << 30):
            pass
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return ""


def _find(proc: Path) -> tuple[_Controller | None, str]:
    why = []
    for version, mount, own in _hierarchies(proc):
        for parent in [own, *own.parents]:
            problem = _usable(version, parent)
            if not problem:
                return _Controller(version, parent), ""
            why.append(f"{problem} (v{version})")
            if parent == mount:
                break
    reason = "; ".join(dict.fromkeys(why)) or "no memory controller is mounted"
    return None, f"No memory cgroup can be made on this machine: {reason}."


def why_no_limits(proc: Path = PROC) -> str:
    """Say in one sentence why memory limits cannot be set; empty where they can."""
    return _find(proc)[1]


def run_limited(
    command: Sequence[str],
    limit_bytes: int,
    *,
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    timeout_s: float | None = None,
) -> LimitedRun:
    """Run a command with at most `limit_bytes` of memory and no swap, and wait for its end.

    Raises:
        StowageError: no limit can be set here.
    """
    controller, why = _find(PROC)
    if controller is None:
        raise StowageError(why)
    with controller.group(limit_bytes) as path:
        # The shell puts itself into the cgroup and becomes the command: nothing of it is charged elsewhere.
        joined = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(path), *command]
        start = time.perf_counter()
        process = subprocess.Popen(
            joined,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=folder,
            text=True,
            errors="replace",
        )
        timed_out = False
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            for child in _read(path / "cgroup.procs").split():
                with contextlib.suppress(OSError):
                    os.kill(int(child), signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        elapsed = time.perf_counter() - start
        killed = controller.kills(path) > 0
        return LimitedRun(
            limit_bytes, killed, timed_out, process.returncode, controller.peak_bytes(path), elapsed, output
        )


@dataclass(frozen=True)
class SmallestLimit:
    """The result of a bisection.

    Attributes:
        limit_bytes: the smallest limit tried under which the command survived.
        killed_bytes: the largest tried under which it did not; 0 if it survived all.
        runs: all runs that were made, in order.
    """

    limit_bytes: int
    killed_bytes: int
    runs: tuple[LimitedRun, ...]


def smallest_surviving_limit(
    run: Callable[[int], LimitedRun], low_bytes: int, high_bytes: int, resolution_bytes: int
) -> SmallestLimit:
    """Bisect for the smallest limit between `low_bytes` and `high_bytes` under which `run(limit)` survives.

    A run that ends after its time does not count as surviving: near the limit the kernel reads the program itself from
    disk again and again.

    Raises:
        StowageError: it does not survive the highest limit, or fails for another reason than memory.
    """
    runs: list[LimitedRun] = []

    def survives(limit: int) -> bool:
        runs.append(run(limit))
        last = runs[-1]
        if last.returncode != 0 and not last.killed and not last.timed_out:
            lines = last.output.strip().splitlines() or ["nothing printed"]
            raise StowageError(f"Under {size_text(limit)} the command failed, but not for memory: {lines[-1]}")
        return last.survived

    if not survives(high_bytes):
        raise StowageError(f"The command does not survive under {size_text(high_bytes)}, the highest limit: raise it.")
    failed = 0
    while high_bytes - low_bytes > resolution_bytes:
        middle = (low_bytes + high_bytes) // 2
        if survives(middle):
            high_bytes = middle
        else:
            low_bytes = failed = middle
    return SmallestLimit(high_bytes, failed, tuple(runs))
