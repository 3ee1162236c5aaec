"""What is asked of a card, by functions that only note it: clocks, events, which card, which switches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stowage.stages.device import cuda as cuda_device
from stowage.stages.device import device_of
from stowage.stages.device.cuda import CudaClock, CudaDevice
from stowage.stages.device.switches import kernel_switches
from stowage.stages.device.tiers import cuda_lanes
from stowage.stages.device.tiers.cuda_lanes import CLOCK_S, CudaLanes
from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.errors import ParameterError
from stowage.stages.kernels.failed import DeviceFailedError, has_failed, raise_if_failed
from stowage.stages.profile import measure
from stowage.stages.profile.measure import measure_call
from stowage.stages.trace import trace_step
from stowage.stages.workload import model_signature


class Noted:
    """Everything in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now_ms = 0.0
        self.made: list[dict[str, Any]] = []


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """`torch.cuda` that notes what it is asked; time passes where `now_ms` is moved."""
    found = Noted()

    class Event:
        def __init__(self, **how: Any) -> None:
            found.made.append(how)
            self.at_ms = -1.0

        def record(self, stream: Any) -> None:
            found.calls.append("record")
            self.at_ms = found.now_ms

        def synchronize(self) -> None:
            found.calls.append("synchronize")

        def elapsed_time(self, other: Event) -> float:
            return other.at_ms - self.at_ms

    @contextlib.contextmanager
    def device(which: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.calls.append(f"sleep {cycles / 2e9:.4f} s"))
    return found


def test_the_host_is_ahead_and_asks_once(noted: Noted) -> None:
    """What a launch takes would count otherwise: the device waits first, and nobody waits for it in between."""
    clock = CudaClock(torch.device("cuda", 0), 100)

    def work(ms: float) -> None:
        noted.calls.append("work")
        noted.now_ms += ms

    for ms in (2.0, 5.0):
        clock.run(lambda ms=ms: work(ms))
    assert noted.calls == ["sleep 0.0030 s", "record", "work", "record", "record", "work", "record"]
    assert clock.seconds() == [0.002, 0.005]
    assert noted.calls[-1] == "synchronize"
    assert noted.calls.count("synchronize") == 1


def test_what_raises_is_not_counted(noted: Noted) -> None:
    clock = CudaClock(torch.device("cuda", 0), 1)

    def fails() -> None:
        raise ValueError("no")

    clock.run(lambda: None)
    with pytest.raises(ValueError, match="no"):
        clock.run(fails)
    clock.run(lambda: None)
    assert len(clock.seconds()) == 2
    assert noted.calls[0] == "sleep 0.0002 s", "at least long enough for one call"


def test_which_card(noted: Noted) -> None:
    found = [device_of(name) for name in ("cuda", "cuda:1", torch.device("cuda", 2))]
    assert [d._device.index for d in found if isinstance(d, CudaDevice)] == [3, 1, 2]
    with pytest.raises(ParameterError, match="device is meta: it must be a CPU or a CUDA device"):
        device_of("meta")


def test_costs_are_of_the_switches_that_choose_kernels(noted: Noted) -> None:
    fingerprint = device_of("cuda:0").fingerprint()
    assert fingerprint == device_of("cuda:1").fingerprint(), "of two equal cards"
    changes: list[Any] = [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: torch.backends.cudnn.flags(benchmark=True),
        lambda: torch.backends.cudnn.flags(deterministic=True),
    ]
    for change in changes:
        with change():
            assert device_of("cuda:0").fingerprint() != fingerprint
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert device_of("cuda:0").fingerprint() != fingerprint
    finally:
        torch.set_float32_matmul_precision(before)
    assert device_of("cuda:0").fingerprint() == fingerprint
    assert kernel_switches() == kernel_switches()


def test_steps_are_of_the_switches_that_choose_attention() -> None:
    """A trace has the kernel that was taken when it was made."""
    model = torch.nn.Linear(2, 2)
    plain = model_signature(model)
    for change in (lambda: sdpa_kernel(SDPBackend.MATH), lambda: torch.backends.mkldnn.flags(enabled=False)):
        with change():
            (sentence,) = plain.differences(model_signature(model))
            assert "the step was traced with" in sentence
    assert model_signature(model) == plain


def test_waiting_threads_leave_the_cores(noted: Noted) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    assert lanes.compute() == "current stream of cuda:3", "the one that was current, whatever is later"
    lanes.record(lanes.side("offload"))
    assert noted.made[-1] == {"enable_timing": True, "blocking": True}


def test_times_of_copies_stay_exact_for_hours(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's milliseconds have 24 bits: an hour after its zero a clock would tell quarters of a millisecond."""
    host_s = 100.0
    monkeypatch.setattr(cuda_lanes.time, "perf_counter", lambda: host_s)
    lanes = CudaLanes(torch.device("cuda", 0))
    event = lanes.record(None)
    noted.now_ms += 5.0
    assert lanes.time_s(event) == pytest.approx(99.995), "it was before the clock was set"
    host_s += 3 * CLOCK_S
    noted.now_ms += 3e3 * CLOCK_S
    late = lanes.record(None)
    assert lanes.time_s(late) == pytest.approx(host_s)
    assert lanes._zero_s == host_s, "it was set anew"


def test_a_dead_card_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other made-up numbers would fail for the same reason, and hide it."""
    assert has_failed(RuntimeError("CUDA error: device-side assert triggered"))
    assert not has_failed(torch.OutOfMemoryError("CUDA out of memory"))
    assert not has_failed(RuntimeError("index out of range"))
    raise_if_failed(ValueError("other contents may do"), "aten.gather.default")
    trace = trace_step(torch.nn.Linear(4, 4), (torch.randn(2, 4),), loss=lambda out, _: out.sum())
    tries: list[int] = []

    def dies(call: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            tries.append(1)
            raise RuntimeError("CUDA error: device-side assert triggered\nmore lines")

        return kernel

    monkeypatch.setattr(measure, "_operator", dies)
    with pytest.raises(DeviceFailedError, match=r"^The GPU has failed while aten\.\w+\.default ran on made-up numbers"):
        measure_call(trace.calls[-1], trace, device_of("cpu"), "cpu")
    assert len(tries) == 1


def test_all_of_a_description_can_be_stored() -> None:
    names = DeviceDescription.__dataclass_fields__
    assert {"library_bytes", "context_bytes"} <= names.keys()
    assert cuda_device.LEAST_AHEAD_S > cuda_device.AHEAD_S
