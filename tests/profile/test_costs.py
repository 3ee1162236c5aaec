"""The store of costs only grows; roofline estimates need no device; measured costs need the right one."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.device import device_of
from stowage.stages.device.cpu import MOST_OTHERS_BYTES, CpuClock, CpuDevice
from stowage.stages.ir.costs import Cost, DeviceDescription, Returned
from stowage.stages.ir.errors import PlanMismatchError, TableError
from stowage.stages.ir.table import FORMAT_VERSION, write_rows
from stowage.stages.ir.trace import TraceTables
from stowage.stages.kernels import ReturnedStore
from stowage.stages.optimizers import Bench
from stowage.stages.profile import CostStore, profile_trace, timing
from stowage.stages.profile import store as costs_of_devices
from stowage.stages.profile.sequence import NOTHINGS, alive_bytes, last_touched
from stowage.stages.profile.store import code_of_costs
from stowage.stages.profile.timing import FEW
from stowage.stages.runtime.random.generators import GeneratorStates
from stowage.stages.trace import trace_step
from stowage.stages.workload.models import build_workload
from tests.permissions import let_others_in

ELSEWHERE = DeviceDescription(
    fingerprint="0123456789abcdef",
    name="another machine",
    type="cpu",
    memory_bytes=1 << 34,
    flops_per_s=1e10,
    memory_copy_bytes_per_s=1e9,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    disk_duplex_bytes_per_s=1e9,
    update_bytes_per_s=1e8,
    dispatch_s=1e-6,
)
HERE = replace(ELSEWHERE, fingerprint=device_of("cpu").fingerprint(), name="here")


def path_in(folder: Path) -> Path:
    return folder / f"device.{code_of_costs()}.{FORMAT_VERSION}.parquet"


def cost(signature: str, time_s: float = 1.0, source: Any = "measured") -> Cost:
    return Cost(signature, "device", time_s, 10, 20, 5, source)


def small_trace(width: int = 8) -> TraceTables:
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width))
    return trace_step(
        model,
        (torch.randn(4, width),),
        loss=lambda outputs, _: outputs.sum(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )


def test_the_store_only_grows_and_keeps_first_measurements(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "costs")
    assert store.read("device") == {}
    store.add("device", [cost("a", 1.0), cost("b", 2.0)])
    store.add("device", [cost("b", 99.0), cost("c", 3.0)])
    assert {s: c.time_s for s, c in store.read("device").items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    store.add("device", [])
    assert len(store.read("device")) == 3
    assert store.read("other_device") == {}


def test_what_another_process_adds_is_read(tmp_path: Path) -> None:
    one, other = CostStore(tmp_path), CostStore(tmp_path)
    one.add("device", [cost("a")])
    known = one.read("device")
    known.clear()
    assert set(one.read("device")) == {"a"}
    other.add("device", [cost("b")])
    assert set(one.read("device")) == {"a", "b"}
    path_in(tmp_path).unlink()
    assert one.read("device") == {}
    assert CostStore(tmp_path / "device.lock" / "below a file").read("device") == {}


def test_a_measurement_replaces_an_estimate_and_never_the_other_way(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    store.add("device", [cost("a", 1.0, "roofline")])
    store.add("device", [cost("a", 2.0, "measured")])
    store.add("device", [cost("a", 3.0, "roofline")])
    assert store.read("device")["a"] == cost("a", 2.0)


@pytest.mark.parametrize("content", [b"PAR1 not really", b"", "another table"])
def test_a_damaged_store_heals_itself(tmp_path: Path, content: bytes | str) -> None:
    store = CostStore(tmp_path)
    store.add("device", [cost("a")])
    if isinstance(content, str):
        write_rows(path_in(tmp_path), Returned, [Returned("a", ())])
    else:
        path_in(tmp_path).write_bytes(content)
    assert store.read("device") == {}
    store.add("device", [cost("b")])
    assert set(CostStore(tmp_path).read("device")) == {"b"}


def test_costs_that_no_call_has_are_measured_again(tmp_path: Path) -> None:
    rows = [
        cost("a"),
        cost("b", -1.0),
        cost("c", math.nan),
        cost("d", math.inf),
        replace(cost("e"), workspace_bytes=-1),
    ]
    write_rows(path_in(tmp_path), Cost, rows)
    assert set(CostStore(tmp_path).read("device")) == {"a"}


@pytest.mark.parametrize("device", ["../../elsewhere", "", "a/b", ".."])
def test_devices_are_no_paths(tmp_path: Path, device: str) -> None:
    for store in (CostStore(tmp_path / "a"), ReturnedStore(tmp_path / "a")):
        with pytest.raises(TableError, match="name of a device"):
            store.read(device)
        with pytest.raises(TableError, match="name of a device"):
            store.add(device, [] if isinstance(store, CostStore) else {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becomes another user")
def test_a_store_of_another_user_is_one_sentence(tmp_path: Path) -> None:
    """Read where that may be; else one sentence, which does not call good files damaged."""
    CostStore(tmp_path).add("device", [cost("a")])
    let_others_in(tmp_path)
    for mode, expected in ((0o644, "['a']"), (0o600, "cannot be read")):
        path_in(tmp_path).chmod(mode)
        assert expected in _as_nobody(tmp_path, "print(list(store.read('device')))")
    path_in(tmp_path).chmod(0o644)
    assert "cannot be written" in _as_nobody(tmp_path, "store.add('device', [])")


def _as_nobody(folder: Path, work: str) -> str:
    code = f"""
import os
from pathlib import Path
from stowage.stages.ir.errors import StowageError
from stowage.stages.profile import CostStore
store = CostStore(Path({str(folder)!r}))
os.setuid(65534)
try:
    {work}
except StowageError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


_ADD = """
import sys
from pathlib import Path
from stowage.stages.ir.costs import Cost
from stowage.stages.profile import CostStore
who = sys.argv[2]
for i in range(8):
    rows = [Cost(s, "device", 1.0, 0, 0, 5, "measured") for s in (f"{who}.{i}", f"shared {i}")]
    CostStore(Path(sys.argv[1])).add("device", rows)
"""


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", _ADD, str(tmp_path), str(who)]) for who in range(3)]
    assert [w.wait() for w in workers] == [0, 0, 0]
    assert len(CostStore(tmp_path).read("device")) == 3 * 8 + 8


def test_measured_costs_are_those_of_every_distinct_call(tmp_path: Path) -> None:
    trace, store = small_trace(), CostStore(tmp_path)
    seen: list[tuple[int, int]] = []
    state = torch.get_rng_state()
    costs = profile_trace(
        trace, HERE, store, seconds_per_call=0.001, min_samples=2, progress=lambda *done: seen.append(done)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert [c.signature for c in costs] == sorted({c.signature for c in trace.calls})
    assert all(c.source == "measured" and c.time_s > 0 and c.samples >= 2 for c in costs)
    assert seen[-1] == (len(costs), len(costs))
    by_target = {c.target: next(k for k in costs if k.signature == c.signature) for c in trace.calls}
    assert by_target["aten.addmm.default"].output_bytes == 4 * 8 * 4
    assert by_target["stowage.update"].output_bytes == 0
    again = profile_trace(trace, HERE, store, min_samples=2, progress=lambda done, total: seen.append((done, total)))
    assert again == costs, "nothing is measured twice"
    assert seen[-1] == (0, 0)
    more = profile_trace(trace, HERE, store, seconds_per_call=0.0, min_samples=2 * max(c.samples for c in costs))
    assert all(after.samples > before.samples for before, after in zip(costs, more)), "few samples are no measurement"
    assert profile_trace(trace, HERE, store, min_samples=2) == more, "and the better ones stay"


def test_an_update_takes_as_much_measured_on_a_copy_of_the_optimizer(tmp_path: Path) -> None:
    """What keeps the generators as they are is not part of it; nor is anything else changed by measuring."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    trace = trace_step(model, (torch.randn(4, 8),), loss=lambda outputs, _: outputs.sum(), optimizer=optimizer)
    updates = [c.signature for c in trace.calls if c.target == "stowage.update"]
    before = GeneratorStates.now(torch.device("cpu")), gc.get_threshold(), gc.get_freeze_count()
    found = []
    for name, make in (("settings", None), ("copy", Bench(optimizer, dict(model.named_parameters())))):
        store = CostStore(tmp_path / name)
        costs = profile_trace(trace, HERE, store, seconds_per_call=0.0, min_samples=1, make_update=make)
        found.append({c.signature: c.workspace_bytes for c in costs if c.signature in updates})
    assert found[0] == found[1]
    assert 0 < max(found[0].values()) <= 3 * 64 * 4
    after = GeneratorStates.now(torch.device("cpu")), gc.get_threshold(), gc.get_freeze_count()
    assert after[0].difference(before[0]) is None
    assert after[1:] == before[1:]


def test_each_run_finds_cold_caches_and_calls_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    evict, time_s, run = CpuDevice.evict, CpuDevice.time_s, CpuClock.run

    def evicted(device: CpuDevice, other_bytes: int) -> None:
        assert other_bytes == alive_bytes(trace, last_touched(trace))
        happened.append("evicted")
        evict(device, other_bytes)

    def timed(device: CpuDevice, work: Callable[[], Any], *, calls: int = 1) -> float:
        happened.append("timed")
        return time_s(device, work, calls=calls)

    def clocked(clock: CpuClock, work: Callable[[], Any]) -> None:
        happened.append("timed")
        run(clock, work)

    monkeypatch.setattr(CpuDevice, "evict", evicted)
    monkeypatch.setattr(CpuDevice, "time_s", timed)
    monkeypatch.setattr(CpuClock, "run", clocked)
    monkeypatch.setattr(timing, "SHORT_S", 1.0)  # also on a machine that does something else
    trace = small_trace(9)
    profile_trace(trace, HERE, CostStore(tmp_path), seconds_per_call=0.0, min_samples=3)
    in_order = [c for c in trace.calls if c.target != "stowage.update"]
    assert len(in_order) >= FEW
    nothings = NOTHINGS * ["timed"]
    window = [*4 * ["evicted", *["timed"] * len(in_order)], *4 * ["evicted", "timed"]]
    updates = {c.signature for c in trace.calls} - {c.signature for c in in_order}
    assert happened == nothings + window + len(updates) * ["timed", *["evicted", "timed"] * 3], (
        "the first run warms up, with clocks between its calls and without"
    )


def test_eviction_takes_no_more_memory_than_is_said() -> None:
    device = CpuDevice()
    for other_bytes in (0, 4, 1 << 40):
        device.evict(other_bytes)
    assert device._other.nbytes == MOST_OTHERS_BYTES


def test_a_foreign_device_is_refused_unless_everything_is_known(tmp_path: Path) -> None:
    trace, store = small_trace(), CostStore(tmp_path)
    with pytest.raises(PlanMismatchError) as caught:
        profile_trace(trace, ELSEWHERE, store)
    text = str(caught.value)
    assert "no measured cost for another machine" in text
    assert "python -m stowage.stages.device" in text
    assert "\n" not in text
    store.add(ELSEWHERE.fingerprint, [cost(c.signature) for c in trace.calls])
    assert len(profile_trace(trace, ELSEWHERE, store)) == len({c.signature for c in trace.calls})


def test_roofline_plans_a_large_model_without_its_weights(tmp_path: Path) -> None:
    """A Llama of 7B's width: nothing is allocated and nothing runs."""
    overrides = {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 512,
    }  # fmt: skip
    workload = build_workload("llama", overrides, None, None, batch_size=4, sequence_length=512, seed=0, fake=True)
    optimizer = torch.optim.AdamW(workload.model.parameters())
    trace = trace_step(workload.model, workload.batch, optimizer=optimizer)
    store = CostStore(tmp_path)
    costs = {c.signature: c for c in profile_trace(trace, ELSEWHERE, store, costs="roofline")}
    assert all(c.source == "roofline" and c.samples == 0 and c.device == ELSEWHERE.fingerprint for c in costs.values())
    product = next(c for c in trace.calls if c.target == "aten.mm.default" and "11008" in c.signature)
    flops = 2 * (4 * 512) * 4096 * 11008
    assert costs[product.signature].time_s == pytest.approx(flops / 1e10 + 1e-6)
    update = next(c for c in trace.calls if c.phase == "update" and "11008" in c.signature)
    size = 4096 * 11008 * 4
    # Reads parameter, gradient and two states, writes all but the gradient.
    assert costs[update.signature].time_s == pytest.approx((3 * size + 4 * size) / 1e8, rel=1e-3)
    assert costs[update.signature].workspace_bytes == 2 * size
    assert store.read(ELSEWHERE.fingerprint) == costs
    with pytest.raises(PlanMismatchError, match="no measured cost"):
        profile_trace(trace, ELSEWHERE, store)


def test_an_operator_that_does_not_run_here_is_named(tmp_path: Path) -> None:
    trace = small_trace()
    position = next(i for i, c in enumerate(trace.calls) if c.target == "aten.addmm.default")
    broken = replace(
        trace.calls[position], arguments=trace.calls[position].arguments.replace('"args":[', '"args":[null,')
    )
    calls = [*trace.calls[:position], broken, *trace.calls[position + 1 :]]
    with pytest.raises(TableError, match=r"aten.addmm.default .* does not run on this device"):
        profile_trace(replace(trace, calls=calls), HERE, CostStore(tmp_path), seconds_per_call=0.001, min_samples=1)


def test_costs_measured_by_other_code_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CostStore(tmp_path)
    store.add("device", [cost("a")])
    assert list(store.read("device")) == ["a"]
    monkeypatch.setattr(costs_of_devices, "MEASURING", (*costs_of_devices.MEASURING, "stowage.stages.profile.similar"))
    assert store.read("device") == {}
