"""Measures costs of several calls together, in turns, so that a machine whose speed drifts slows all of them."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from stowage.stages.device import Device, device_of
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import UPDATE, UPDATE_ALL
from stowage.stages.kernels import Outputs
from stowage.stages.kernels.failed import raise_if_failed
from stowage.stages.profile.measure import Alone, MadeUpError, measure_call
from stowage.stages.profile.samples import weigh
from stowage.stages.profile.sequence import WindowRun, alive_bytes, bookkeeping_s, last_touched
from stowage.stages.profile.updates import MakeUpdate, measure_update
from stowage.stages.profile.windows import Window, choose_windows
from stowage.stages.profile.written import Written

Samples = list[tuple[str, float]]
"""Signature and seconds of executions."""

PASSES = 3
"""Timed executions of a window, or of a call by itself, in one turn, after one that warms up."""

SHORT_S = 50e-6
"""Seconds: between calls that take longer on average, reading a clock does not matter."""

FEW = 8
"""Timed calls of a window: with fewer, the call of a function of them takes a noticeable part of the time."""

MOST_TURNS = 34
"""Most turns of each window or call."""

MOST_S = 30.0
"""Most seconds for all calls: then measuring ends, once there are as many samples as asked for."""

KEPT_EVERY_S = 2.0
"""Seconds between two times that calls timed often enough are stored, so that an interruption loses no more."""

NEVER = (1 << 31) - 1
"""A threshold that Python's garbage collector does not reach."""


@dataclass(frozen=True)
class Patience:
    """How long to measure.

    Attributes:
        seconds_per_call: time spent, for each distinct call.
        min_samples: timed executions of each call, at least.
    """

    seconds_per_call: float
    min_samples: int


def measure_together(
    work: Sequence[tuple[TraceTables, Sequence[Call]]],
    target: DeviceDescription,
    patience: Patience,
    progress: Callable[[float], None],
    returned: Callable[[Mapping[str, Outputs]], None] = lambda found: None,
    make_update: MakeUpdate | None = None,
    keep: Callable[[list[Cost]], None] = lambda costs: None,
) -> list[Cost]:
    """Measure one cost for each of some calls, which have distinct signatures.

    There is none for calls that take no contents that were made up for them.

    Args:
        work: traces with the calls that are of interest; none is clipping.
        target: this machine's device.
        patience: how long to measure.
        progress: called with the part that is done, before every turn of a window or a call.
        returned: called with what calls return, by signature, before they are timed.
        make_update: makes updates of the user's own optimizer, see `measure_update`.
        keep: called now and then with the costs of calls that were timed often enough.

    Raises:
        TableError: an operator does not run on this device.
    """
    device, passes = device_of(target.type), min(PASSES, patience.min_samples)
    sought = [(_Runs(trace, device, target.type, passes, make_update), calls) for trace, calls in work]
    memory: dict[str, Alone] = {}
    for runs, calls in sought:
        for call in calls:
            with suppress(MadeUpError):
                memory[call.signature] = replace(runs.alone(call), work=_nothing)
    returned({signature: alone.outputs for signature, alone in memory.items() if alone.outputs is not None})
    if not memory:
        return []

    def costs(samples: Mapping[str, Sequence[float]]) -> list[Cost]:
        times = weigh(samples)
        return [
            Cost(
                signature=signature,
                device=target.fingerprint,
                time_s=times[signature],
                output_bytes=memory[signature].output_bytes,
                workspace_bytes=memory[signature].workspace_bytes,
                samples=len(found),
                source="measured",
                flagged_bytes=memory[signature].flagged_bytes,
            )
            for signature, found in samples.items()
        ]

    kept_s = time.perf_counter()

    def enough(samples: Mapping[str, Sequence[float]]) -> None:
        nonlocal kept_s
        if time.perf_counter() - kept_s > KEPT_EVERY_S:
            keep(costs({name: s for name, s in samples.items() if len(s) >= max(patience.min_samples, 1)}))
            kept_s = time.perf_counter()

    sought = [(runs, [call for call in calls if call.signature in memory]) for runs, calls in sought]
    with _collector_at_rest():
        samples = _in_turns(sought, patience, progress, enough)
    return costs(samples)


def _nothing() -> None:
    """Replace work that is not done again, and would keep its tensors in memory."""


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Let Python's garbage collector look at new objects alone.

    A pass over all that exist takes longer than most calls, and the objects of a trace are not there in training.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _in_turns(
    sought: Sequence[tuple[_Runs, Sequence[Call]]],
    patience: Patience,
    progress: Callable[[float], None],
    look: Callable[[Mapping[str, Sequence[float]]], None],
) -> dict[str, list[float]]:
    """Return the seconds of every execution, by signature."""
    found: dict[str, list[float]] = {call.signature: [] for _, calls in sought for call in calls}
    windows = [
        (runs, window) for runs, calls in sought for window in choose_windows(runs.trace, {c.signature for c in calls})
    ]
    seconds, spent = min(patience.seconds_per_call * len(found), MOST_S), 0.0
    for turn in itertools.count():
        enough = min(map(len, found.values())) >= patience.min_samples
        if enough and (spent >= seconds or turn >= MOST_TURNS):
            break
        in_window = {
            call.signature for runs, window in windows for call in window.timed if call.signature not in runs.failing
        }
        lone = [(runs, call) for runs, calls in sought for call in calls if call.signature not in in_window]
        works: list[tuple[_Runs, Window | Call]] = [*windows, *lone]
        for runs, work in works:
            progress(min(spent / seconds, 1.0) if seconds else 0.0)
            began = time.perf_counter()
            samples = runs.of_call(work) if isinstance(work, Call) else runs.of_window(work)
            spent += time.perf_counter() - began
            if samples is None:  # from now on its calls run alone
                windows = [other for other in windows if other[1] is not work]
            for signature, elapsed_s in samples or ():
                if signature in found:
                    found[signature].append(elapsed_s)
            look(found)
    return found


class _Runs:
    """Executes windows and calls of one trace.

    Args:
        trace: the step.
        device: times the calls.
        kind: the device's type, for PyTorch.
        passes: timed executions in one turn.
        make_update: makes updates of the user's own optimizer, see `measure_update`.

    Attributes:
        failing: signatures of calls that raised in a window, at what the calls before them made.
    """

    def __init__(
        self, trace: TraceTables, device: Device, kind: str, passes: int, make_update: MakeUpdate | None = None
    ) -> None:
        self._make_update = make_update
        self.trace = trace
        self._device, self._kind, self._passes = device, kind, passes
        self._last = last_touched(trace)
        self._other_bytes = alive_bytes(trace, self._last)
        self._bookkeeping_s = bookkeeping_s(device)
        self._written: dict[int, Written | None] = {}
        self.failing: set[str] = set()

    def of_call(self, call: Call) -> Samples:
        """Time one call by itself, while the caches are full of other parts of the step."""
        alone = self.alone(call)
        with torch.set_grad_enabled(call.target in (UPDATE, UPDATE_ALL)):
            self._device.time_s(alone.work)
            samples: Samples = []
            for _ in range(self._passes):
                self._device.evict(self._other_bytes)
                samples.append((call.signature, self._device.time_s(alone.work)))
        return samples

    def of_window(self, window: Window) -> Samples | None:
        """Time a window's calls, without those in `failing`; return None if it does not run on made-up tensors."""
        try:
            return self._passed(window)
        except Exception as problem:  # an operator may raise anything
            raise_if_failed(problem, window.timed[0].target)
            return None

    @torch.no_grad()
    def _passed(self, window: Window) -> Samples:
        run = WindowRun(window, self.trace, self._last, self._device, self._kind)
        passes: list[Samples] = []
        with torch._C._AutoDispatchBelowAutograd():  # in the dispatch mode in which a step calls them
            for _ in range(1 + self._passes):  # the first one warms up
                self._device.evict(self._other_bytes)
                passes.append([(name, max(0.0, taken - self._bookkeeping_s)) for name, taken in run.times()])
            self.failing |= run.failing
            part = self._part(window, run, [sum(taken for _, taken in samples) for samples in passes[1:]])
        return [(name, taken * part) for samples in passes[1:] for name, taken in samples if name not in self.failing]

    def _part(self, window: Window, run: WindowRun, clocked_s: list[float]) -> float:
        """Return the share of the timed calls' time that they take without clocks between them.

        It is less than 1 for short calls: between clocks even the interpreter finds its caches full of something else.
        """
        if len(window.timed) < FEW or min(clocked_s) > SHORT_S * len(window.timed):
            return 1.0
        first = window.timed[0].call
        if first not in self._written:
            self._written[first] = run.written()
        written = self._written[first]
        if written is None or not any(clocked_s):
            return 1.0
        written_s: list[float] = []
        for _ in range(1 + self._passes):  # the first one warms up: the interpreter learns as it runs
            self._device.evict(self._other_bytes)
            written_s.append(run.written_s(written))
        return statistics.median(written_s[1:]) / statistics.median(clocked_s)

    def alone(self, call: Call) -> Alone:
        """Measure a call by itself.

        Raises:
            TableError: the operator does not run on this device.
            MadeUpError: it takes none of the contents that were tried.
        """
        if call.target in (UPDATE, UPDATE_ALL):  # as in a training loop; the optimizer switches gradients off itself
            return measure_update(call, self.trace, self._device, self._kind, self._make_update)
        with torch.no_grad():
            return measure_call(call, self.trace, self._device, self._kind)
