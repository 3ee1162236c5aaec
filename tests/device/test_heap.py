"""What glibc's heap holds on to, with and without a fixed threshold."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import pytest

from stowage.stages.device import heap

MIB = 1 << 20
TENSORS = """
import json, sys, time, torch
from stowage.stages.device import heap

torch.set_num_threads(1)
how, value = sys.argv[1], int(sys.argv[2])
if how == "threshold":
    assert heap.return_freed_memory(value)
start = heap.resident_bytes()
guard = heap.ResidentLimit(start + value) if how == "limit" else None
large = torch.ones(31 << 18)
del large  # from now on glibc keeps blocks up to 31 MiB in its heap
tensors, kept = [], []
for mib in range(1, 25):
    tensors.append(torch.ones(mib << 18))
    kept.append(torch.ones(1 << 17))  # half a MiB, too small for any threshold, stays behind each
    if guard is not None:
        guard.check()
start += sum(tensor.nbytes for tensor in kept)
excess = heap.resident_bytes() - start - sum(tensor.nbytes for tensor in tensors)
tensors.clear()
if guard is not None:
    time.sleep(1)
    guard.check()
print(json.dumps({"excess": excess, "left": heap.resident_bytes() - start, "trims": guard.trims if guard else 0}))
"""


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")


def grown(how: str, value: int) -> dict[str, Any]:
    """A process makes tensors of 1 to 24 MiB, 300 MiB together, and frees them."""
    ended = subprocess.run(
        [sys.executable, "-c", TENSORS, how, str(value)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_freed_memory_goes_back() -> None:
    plain, fixed = grown("plain", 0), grown("threshold", heap.THRESHOLD)
    assert fixed["excess"] < 4 * MIB
    assert fixed["left"] < 4 * MIB
    assert plain["left"] > 200 * MIB


def test_freed_memory_goes_back_where_a_limit_is_passed() -> None:
    limited = grown("limit", 50 * MIB)
    assert limited["left"] < 50 * MIB
    assert limited["trims"] > 0
    unlimited = grown("limit", 1000 * MIB)
    assert unlimited["left"] > 200 * MIB
    assert unlimited["trims"] == 0


FRESH_PAGES = """
import json, resource, torch
from stowage.stages.device import heap

torch.set_num_threads(1)
assert heap.keep_freed_memory()


def faults_of_one_round():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(mib << 18) for mib in range(1, 25)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print(json.dumps([faults_of_one_round() for _ in range(4)]))
"""


def test_kept_memory_needs_no_fresh_pages() -> None:
    ended = subprocess.run([sys.executable, "-c", FRESH_PAGES], capture_output=True, text=True, check=True)
    first, *_, last = json.loads(ended.stdout)
    assert first > 10_000
    assert last < 1_000


def test_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    assert not heap.return_freed_memory()
    assert not heap.keep_freed_memory()
    assert not heap.trim()
