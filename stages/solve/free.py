"""Finds what `device_budget: auto` stands for: the memory that is free for one process, less a reserve.

On Linux a process may take what the kernel calls available, and no more than each control group (cgroup, version 1 or
2) above it still admits; containers and batch systems limit jobs that way. File caches that the kernel would give up
count as free.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stowage.stages.ir.errors import MIB, ParameterError, size_text

RESERVE = 0.05
"""Share of what is free: allocators take more than they give, and other processes grow."""

LEAST_RESERVE_BYTES = 256 * MIB

UNLIMITED = 1 << 60
"""Bytes from which on a limit is none: version 1 of control groups writes "no limit" as a huge number."""


@dataclass(frozen=True)
class Free:
    """Free memory that a process may still take.

    Attributes:
        nbytes: how much there is.
        where: who says so, for people: `this machine`, `the cgroup /job`.
    """

    nbytes: int
    where: str


@dataclass(frozen=True)
class AutoBudget:
    """The budget that `auto` stands for.

    Attributes:
        nbytes: bytes of the device.
        said: how it was found, for people.
    """

    nbytes: int
    said: str


def auto_budget(free: Free, retained_bytes: int = 0, extra_bytes: int = 0) -> AutoBudget:
    """Add what is free and what the training step has there already, less a reserve.

    Args:
        free: free memory of the device.
        retained_bytes: bytes of the model, its gradients and its optimizer that are in memory now; a budget counts
            them.
        extra_bytes: to spare besides: for the process itself where it has not started yet.

    Raises:
        ParameterError: nothing is left.
    """
    reserve = max(int(RESERVE * free.nbytes), LEAST_RESERVE_BYTES) + extra_bytes
    nbytes = free.nbytes + retained_bytes - reserve
    beside = f" and {size_text(retained_bytes)} that the model has already" if retained_bytes else ""
    said = f"{size_text(free.nbytes)} free on {free.where}{beside}, less a reserve of {size_text(reserve)}"
    if nbytes <= 0:
        raise ParameterError(f"device_budget 'auto' finds no memory ({said}): free some, or give a budget in bytes.")
    return AutoBudget(nbytes, said)


def free_ram(root: Path = Path("/")) -> Free:
    """Return the RAM that is free for this process: the least of what machine and control groups admit.

    Args:
        root: where `proc` and the mounted control groups are looked for.

    Raises:
        ParameterError: this system does not say.
    """
    found = [*_available(root), *_cgroups(root)]
    if not found:
        raise ParameterError(
            "device_budget 'auto' cannot tell how much memory is free on this system: give a budget in bytes."
        )
    return min(found, key=lambda free: free.nbytes)


def free_on_gpu(name: str) -> Free:
    """Return what is free on a GPU of this machine, as its driver says.

    Args:
        name: name of the device that plans are for; it begins with the GPU's own.

    Raises:
        ParameterError: there is none of that name here.
    """
    tool = shutil.which("nvidia-smi")
    asked = ["--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    text = ""
    if tool is not None:
        text = subprocess.run([tool, *asked], capture_output=True, text=True, check=False).stdout
    for line in text.splitlines():
        gpu, _, mebibytes = line.rpartition(",")
        if gpu.strip() and gpu.strip() in name and mebibytes.strip().isdecimal():
            return Free(int(mebibytes) * MIB, gpu.strip())
    raise ParameterError(
        f"device_budget 'auto' asks what is free on {name}, which is not in this machine: give a budget in bytes."
    )


def _available(root: Path) -> Iterator[Free]:
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        yield Free(int(found[1]) * 1024, "this machine")


def _cgroups(root: Path) -> Iterator[Free]:
    """Yield what each control group from the process's own up to the mounted root still admits."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        for mounted, inside in _mounts(root, version=1 if controllers else 2):
            # A container may see only what is inside its own group.
            beneath = path.removeprefix(inside.rstrip("/")) if path.startswith(inside) else "/"
            folder = root / mounted.lstrip("/")
            parts = [part for part in beneath.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                group = folder.joinpath(*parts[:depth])
                free = _limit_1(group) if controllers else _limit_2(group)
                if free is not None:
                    name = "/" + str(group.relative_to(folder)).removeprefix(".")
                    yield Free(free, f"the cgroup {name}")


def _mounts(root: Path, *, version: int) -> Iterator[tuple[str, str]]:
    """Yield the mount point and the group of each hierarchy that controls memory."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        first, _, last = line.partition(" - ")
        left, right = first.split(), last.split()
        if len(left) < 5 or len(right) < 3:
            continue
        if (version, right[0]) == (2, "cgroup2") or (
            (version, right[0]) == (1, "cgroup") and "memory" in right[2].split(",")
        ):
            yield left[4], left[3]


def _limit_2(group: Path) -> int | None:
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():  # `max`, or no controller of memory here
        return None
    return max(0, int(limit) - int(used) + _stated(group, "inactive_file"))


def _limit_1(group: Path) -> int | None:
    limit = _text(group / "memory.limit_in_bytes").strip()
    used = _text(group / "memory.usage_in_bytes").strip()
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= UNLIMITED:
        return None
    return max(0, int(limit) - int(used) + _stated(group, "total_inactive_file"))


def _stated(group: Path, key: str) -> int:
    found = re.search(rf"^{key} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
