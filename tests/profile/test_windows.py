"""Calls are timed in the order of the step, in windows that cover every distinct one and take little memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stowage.stages.device import device_of
from stowage.stages.device.cpu import CpuClock, CpuDevice
from stowage.stages.ir.trace import Call, Storage, TraceMeta, TraceTables, Value
from stowage.stages.ir.updates import CLIP, UPDATE
from stowage.stages.profile import timing
from stowage.stages.profile.samples import OUTLIERS, typical_s, weigh
from stowage.stages.profile.sequence import WindowRun, alive_bytes, last_touched
from stowage.stages.profile.timing import MOST_TURNS, Patience, _Runs, measure_together
from stowage.stages.profile.windows import BRIDGE, LEAD, LEAD_BYTES, MOST_LEAD, choose_windows
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.profile.test_costs import HERE
from tests.zoo import REMAT, ZOO

META = TraceMeta("hash", "model", "cpu", "2.11.0", -1, "", 0)


def chain(signatures: list[str], sizes: list[int]) -> TraceTables:
    """Calls that each read what the one before returns."""
    storages = [Storage(0, 4, "input", "x")]
    values = [Value(0, 0, -1, 0, "float32", (1,), (1,), 0, "x")]
    calls: list[Call] = []
    for k, (signature, nbytes) in enumerate(zip(signatures, sizes, strict=True)):
        storages.append(Storage(k + 1, nbytes, "temporary", ""))
        values.append(Value(k + 1, k + 1, k, 0, "float32", (nbytes // 4,), (1,), 0, f"v{k}"))
        target = UPDATE if signature == "update" else CLIP if signature == "clip" else "aten.abs.default"
        calls.append(
            Call(
                call=k,
                target=target,
                arguments=json.dumps({"args": [{"value": k}], "kwargs": {}}),
                reads=(k,),
                returns=(k + 1,),
                returns_many=False,
                mutates=(),
                is_view=False,
                is_random=False,
                replay_arguments="",
                phase="forward",
                module="",
                location="",
                signature=signature,
            )
        )
    return TraceTables(storages, values, calls, [], [], META)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "d", "other", "update"]), st.sampled_from([4, 40, 400])), max_size=200
    ),
    st.sets(st.sampled_from(["a", "b", "c", "d", "update", "absent"])),
    st.integers(1, 4),
    st.sampled_from([100, 1000, 1 << 20]),
)
def test_every_distinct_call_is_in_small_windows(
    drawn: list[tuple[str, int]], wanted: set[str], occurrences: int, window_bytes: int
) -> None:
    trace = chain([s for s, _ in drawn], [n for _, n in drawn])
    windows = choose_windows(trace, wanted, window_bytes=window_bytes, occurrences=occurrences)
    operators = [c.call for c in trace.calls if c.target != UPDATE]
    timed = [c.call for window in windows for c in window.timed]
    assert timed == sorted(set(timed)), "in order, none twice"
    met = Counter(trace.calls[k].signature for k in timed)
    there = Counter(trace.calls[k].signature for k in operators)
    for signature in wanted:
        assert met[signature] >= min(occurrences, there[signature])
    for window in windows:
        positions = [operators.index(c.call) for c in window.calls]
        assert positions == list(range(positions[0], positions[0] + len(positions))), "consecutive"
        assert 0 <= window.lead <= MOST_LEAD
        assert window.timed
        nbytes = sum(trace.storages[s].nbytes for s in {v for c in window.calls for v in (*c.reads, *c.returns)})
        assert nbytes <= window_bytes or len(window.timed) == 1


def test_of_many_equal_calls_a_few_are_run() -> None:
    trace = chain(["a", *["x"] * 9] * 1000, [4] * 10_000)
    windows = choose_windows(trace, {"a"})
    assert 4 <= sum(len(w.timed) for w in windows) <= 4 * BRIDGE
    everything = choose_windows(trace, {"a", "x"}, occurrences=10_000)
    assert sum(len(w.timed) for w in everything) == 10_000


def test_short_calls_follow_many_others() -> None:
    """What a core keeps near is then of the step, whatever filled the caches before."""
    for nbytes, lead in ((4, MOST_LEAD), (LEAD_BYTES // 64, 62), (LEAD_BYTES // 4, LEAD)):
        trace = chain([*["x"] * 999, "a"], [nbytes] * 1000)
        (window,) = choose_windows(trace, {"a"})
        assert window.lead == lead
    (window,) = choose_windows(chain([*["x"] * 5, "a"], [4] * 6), {"a"})
    assert window.lead == 5, "all that there are"


@given(st.lists(st.integers(1, 9).map(lambda n: 4 * n), max_size=40))
def test_bytes_alive_on_average(sizes: list[int]) -> None:
    trace = chain(["a"] * len(sizes), sizes)
    alive = [trace.storages[k].nbytes + trace.storages[k + 1].nbytes for k in range(len(sizes))]
    assert alive_bytes(trace, last_touched(trace)) == sum(alive) // max(1, len(alive))


def test_clipping_is_in_no_window() -> None:
    trace = chain(["a", "clip", "a", "update"], [4] * 4)
    (window,) = choose_windows(trace, {"a", "clip", "update"})
    assert [c.signature for c in window.calls] == ["a", "a"]


@pytest.mark.parametrize(
    "name",
    some(
        [*REMAT, "bert", "in_place", "tied", "batchnorm", "two_outputs"],
        keep=["gpt2", "lstm", "mixer", "batchnorm", "two_outputs"],
    ),
)
def test_windows_run_on_made_up_tensors(name: str) -> None:
    """None falls back to calls by themselves."""
    model, batch, loss = (REMAT | ZOO)[name]()
    trace = trace_step(model, batch, loss=loss)
    signatures = {c.signature for c in trace.calls}
    runs = _Runs(trace, device_of("cpu"), "cpu", 1)
    seen: set[str] = set()
    for window in choose_windows(trace, signatures):
        samples = runs.of_window(window)
        assert samples is not None
        assert [s for s, _ in samples] == [c.signature for c in window.timed]
        seen.update(s for s, _ in samples)
    assert seen == signatures


def test_a_window_computes_what_its_calls_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the inputs of a step in place of made-up ones it ends with the loss and the gradients of plain PyTorch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    x = torch.randn(4, 8)
    trace = trace_step(model, (x,), loss=lambda outputs, _: outputs.square().mean())
    (window,) = choose_windows(trace, {c.signature for c in trace.calls}, occurrences=1000)
    assert [c.call for c in window.calls] == [c.call for c in trace.calls]
    given_now = dict(model.state_dict(keep_vars=True))

    def real(run: WindowRun, value: Value, reader: object, bases: object) -> dict[int, torch.Tensor]:
        name = value.source.partition(":")[2]
        tensor = given_now[name].detach().clone() if name in given_now else x
        return {value.value: tensor}

    monkeypatch.setattr(WindowRun, "_given_values", real)
    wanted = {trace.meta.loss_value, *(g.gradient_value for g in trace.gradients)}
    last = last_touched(trace) | {trace.values[v].storage: -1 for v in wanted}  # they stay
    run = WindowRun(window, trace, last, device_of("cpu"), "cpu")
    kept: list[dict[int, torch.Tensor]] = []
    run_one = CpuClock.run
    monkeypatch.setattr(CpuClock, "run", lambda clock, work: (kept.append(work.args[-1]), run_one(clock, work))[1])
    with torch.no_grad():
        run.times()
    loss = model(x).square().mean()
    loss.backward()
    values = kept[-1]
    assert torch.equal(values[trace.meta.loss_value], loss)
    for gradient in trace.gradients:
        assert torch.equal(values[gradient.gradient_value], model.get_parameter(gradient.parameter).grad)
    written = WindowRun(window, trace, last, device_of("cpu"), "cpu").written()
    assert written is not None
    with torch.no_grad():
        outlive = written.function(*(run._given[value] for value in written.reads))
    inside = {v for c in window.calls for v in c.returns}
    alive = [v for c in window.calls for v in c.returns if v in values]
    assert all(torch.equal(values[v], tensor) for v, tensor in zip(alive, outlive, strict=True)), (
        "together as one by one"
    )
    assert set(values) & inside == {
        v for v in inside if last[trace.values[v].storage] not in {c.call for c in window.calls}
    }, "the rest was freed on the way"


@pytest.mark.parametrize(("taken", "part"), [(9e-6, 0.5), (9e-3, 1.0)])
def test_short_calls_take_what_they_take_together(monkeypatch: pytest.MonkeyPatch, taken: float, part: float) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    trace = trace_step(model, (torch.randn(2, 4),), loss=lambda outputs, _: outputs.sum())
    (window,) = choose_windows(trace, {c.signature for c in trace.calls})
    monkeypatch.setattr(timing, "bookkeeping_s", lambda device: 1e-6)
    monkeypatch.setattr(WindowRun, "times", lambda run: [(c.signature, taken) for c in window.timed])
    together = itertools.cycle([1e-3, 4e-6, 4e-6, 1e-3])  # to warm up, then with an interruption
    monkeypatch.setattr(WindowRun, "written_s", lambda run, written: next(together) * len(window.timed))
    runs = _Runs(trace, device_of("cpu"), "cpu", 3)
    for _ in range(2):
        samples = runs.of_window(window)
        assert samples == [(c.signature, pytest.approx((taken - 1e-6) * part)) for c in window.timed] * 3


def test_what_weights_make_stays_of_their_size() -> None:
    """A step computes nothing that over- or underflows, on which some operators take longer; nor does a window."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    trace = trace_step(model, (torch.randn(64, 64),), loss=lambda outputs, _: outputs.exp().mean())
    (window,) = choose_windows(trace, {c.signature for c in trace.calls}, occurrences=1000)
    made = [v for c in window.calls for v in c.returns]
    last = dict.fromkeys(last_touched(trace), -1)  # all stay
    written = WindowRun(window, trace, last, device_of("cpu"), "cpu").written()
    run = WindowRun(window, trace, last, device_of("cpu"), "cpu")
    assert written is not None
    with torch.no_grad():
        values = written.function(*(run._given[value] for value in written.reads))
    assert len(values) == len(made)
    assert all(1e-6 < tensor.abs().max() < 1e12 for tensor in values)


def test_sums_take_the_memory_that_they_take_in_a_step() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return y.detach() + y.sin().detach() + y.sum(0)

    trace = trace_step(Sums(), (torch.randn(4, 4),), loss=lambda outputs, _: outputs.sum())
    (window,) = choose_windows(trace, {c.signature for c in trace.calls}, occurrences=1000)
    run = WindowRun(window, trace, last_touched(trace), device_of("cpu"), "cpu")
    sums = [line.kernel for line in run._lines if line.kernel in (torch.Tensor.add, torch.Tensor.add_)]
    assert sums == [torch.Tensor.add_, torch.Tensor.add_]
    kept = dict.fromkeys(last_touched(trace), -1)
    run = WindowRun(window, trace, kept, device_of("cpu"), "cpu")
    assert [line.kernel for line in run._lines].count(torch.Tensor.add) == 2, "what is needed later stays"


def test_what_does_not_run_in_a_window_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: WindowRun) -> list[tuple[str, float]]:
        raise RuntimeError("index out of range")

    monkeypatch.setattr(WindowRun, "times", fails)
    trace = trace_step(nn.Linear(4, 4), (torch.randn(2, 4),), loss=lambda outputs, _: outputs.sum())
    calls = list({c.signature: c for c in trace.calls}.values())
    costs = measure_together([(trace, calls)], HERE, Patience(0.0, 4), lambda part: None)
    assert [c.signature for c in costs] == [c.signature for c in calls]
    assert all(c.time_s > 0 and c.samples >= 4 for c in costs)


def test_calls_of_several_traces_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a machine that becomes slower and slower
    monkeypatch.setattr(CpuDevice, "time_s", lambda device, work, *, calls=1: (work(), float(next(clock)))[1])
    monkeypatch.setattr(CpuClock, "run", lambda self, work: (work(), self._seconds.append(float(next(clock))))[1])
    traces = [
        trace_step(nn.Linear(4, width), (torch.randn(2, 4),), loss=lambda outputs, _: outputs.sum()) for width in (3, 5)
    ]
    first = {c.signature: c for c in traces[0].calls}
    second = {c.signature: c for c in traces[1].calls if c.signature not in first}
    parts: list[float] = []
    work = [(traces[0], list(first.values())), (traces[1], list(second.values()))]
    costs = {c.signature: c for c in measure_together(work, HERE, Patience(0.0, 6), parts.append)}
    assert costs.keys() == first.keys() | second.keys()
    assert parts == [0.0] * 4, "two turns of each"
    times = [c.time_s for c in costs.values()]
    assert max(times) - min(times) < next(clock) / 2, "none saw the first or the last moments alone"


def test_patience_ends() -> None:
    trace = trace_step(nn.Linear(4, 4), (torch.randn(2, 4),), loss=lambda outputs, _: outputs.sum())
    parts: list[float] = []
    calls = list({c.signature: c for c in trace.calls}.values())
    costs = measure_together([(trace, calls)], HERE, Patience(3600.0, 1), parts.append)
    assert len(parts) == MOST_TURNS
    assert all(c.samples >= MOST_TURNS for c in costs)
    assert parts == sorted(parts)


def test_nothing_to_measure() -> None:
    trace = chain([], [])
    assert measure_together([(trace, [])], HERE, Patience(1.0, 1), lambda part: None) == []


def test_outliers_do_not_say_what_a_call_costs_but_count_for_all() -> None:
    assert typical_s([1.0, 1.0, 9.0]) == pytest.approx(11 / 3), "of few samples none is an outlier"
    quiet = [1.0] * 19
    assert typical_s([*quiet, 100.0]) == 1.0
    assert int(OUTLIERS * 20) >= 1
    samples = {"interrupted": [*quiet, 21.0], "lucky": [3.0] * 20}
    times = weigh(samples)
    assert times["lucky"] / times["interrupted"] == pytest.approx(3.0)
    assert sum(20 * t for t in times.values()) == pytest.approx(sum(map(sum, samples.values())))
    assert weigh({}) == {}
    assert weigh({"free": [0.0]}) == {"free": 0.0}
