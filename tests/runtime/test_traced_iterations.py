"""A traced iteration: the steps of the plan in order, its copies, and a file that trace viewers read."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stowage.stages.device.tiers import DiskTier
from stowage.stages.ir.actions import shown_lanes
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans, steps_of
from stowage.stages.runtime.observe.tracing import trace_iteration
from tests.offload.with_lower_tier import program_with_lower_tier, smallest_with_lower_tier, solve_with_lower_tier
from tests.runtime.beside_eager import adamw, prepare, program_of
from tests.solve.prepared import Prepared
from tests.zoo import ZOO

BUILD = ZOO["gpt2"]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(BUILD, adamw)


def check_chrome_trace(text: str) -> None:
    """Complete events of two named processes, a named thread for each stream; what is on one thread nests."""
    content = json.loads(text)
    events = content["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "predicted", 2: "measured"}
    assert sorted(names.values()) == sorted(2 * shown_lanes())
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert {names[e["pid"], e["tid"]] for e in complete} >= {"compute", "offload", "reload", "update"}
    for pid, tid in names:
        ends: list[float] = []
        for event in (e for e in complete if (e["pid"], e["tid"]) == (pid, tid)):
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert math.isfinite(event["ts"] + event["dur"])
            assert event["name"]
            if names[pid, tid] == "compute":
                while ends and event["ts"] >= ends[-1] - 0.01:
                    ends.pop()
                assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.01, "slices of a thread nest"
                ends.append(event["ts"] + event["dur"])


def test_a_traced_iteration_has_every_step_and_every_copy(prepared: Prepared, tmp_path: Path) -> None:
    solved = solve_with_lower_tier(prepared, int(1.1 * smallest_with_lower_tier(prepared)))
    model, batch, _ = BUILD()
    program, offloading = program_with_lower_tier(
        prepared, solved, model, adamw(model), DiskTier(tmp_path, chunk_bytes=1 << 16)
    )
    program(batch)
    program(batch)
    loss, measured = trace_iteration(program, lambda: program(batch))
    assert isinstance(loss, torch.Tensor)
    predicted = predicted_spans(solved.rows, prepared.nodes, solved.slots)
    steps = steps_of(measured, "measured")
    assert [s.name for s in steps] == [s.name for s in steps_of(predicted, "predicted")]
    assert steps[0].start_s == 0.0
    assert all(a.end_s == b.start_s for a, b in pairwise(steps))
    end = steps[-1].end_s

    def moved(spans: list[TraceSpan], stream: str) -> Counter[tuple[str, int]]:
        """Copies that the iteration began itself."""
        return Counter((s.name, s.nbytes) for s in spans if s.stream == stream)

    for stream in ("offload", "reload"):
        assert moved(measured, stream) >= moved(predicted, stream)
        assert moved(predicted, stream)
    assert all(-10 < s.start_s <= s.end_s for s in measured)
    for span in measured:
        if span.stream in ("wait", "update"):
            assert -1e-3 <= span.start_s <= span.end_s <= end + 1e-3
    assert {s.name for s in measured if s.stream == "update"} == {n for n, _ in model.named_parameters()}
    check_chrome_trace(chrome_trace([*predicted, *measured], {"plan": "p"}))

    assert program.recorder is None
    before = len(offloading.tier.spans)
    program(batch)
    assert len(offloading.tier.spans) == before, "nothing is recorded any more"


def test_predicted_spans_add_up(prepared: Prepared) -> None:
    solved = solve_with_lower_tier(prepared, int(1.1 * smallest_with_lower_tier(prepared)))
    spans = predicted_spans(solved.rows, prepared.nodes, solved.slots)
    steps = steps_of(spans, "predicted")
    assert sum(s.end_s - s.start_s for s in steps) == pytest.approx(solved.summary.step_time_s)
    assert sum(s.nbytes for s in spans if s.stream == "reload") == solved.summary.reload_bytes
    assert sum(s.nbytes for s in spans if s.stream == "offload") == solved.summary.offload_bytes
    waits = sum(s.end_s - s.start_s for s in spans if s.stream == "wait")
    assert waits == pytest.approx(solved.summary.wait_s)


def test_a_plan_without_a_tier_is_traced_too(prepared: Prepared) -> None:
    solved = prepared.smallest()
    model, batch, _ = BUILD()
    program = program_of(prepared, solved, model, adamw(model))
    _, measured = trace_iteration(program, lambda: program(batch))
    names = [s.name for s in steps_of(measured, "measured")]
    assert names == [s.name for s in steps_of(predicted_spans(solved.rows, prepared.nodes), "predicted")]
    assert {s.stream for s in measured} == {"compute", "update"}
