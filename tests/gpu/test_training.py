"""Training under plans made by hand equals plain PyTorch: what a GPU could do differently from a CPU."""

from __future__ import annotations

import pytest
import torch

from stowage.flows.planning.by_rules import Rules
from stowage.stages.ir.errors import TraceError
from stowage.stages.runtime.observe.tracing import trace_iteration
from tests.gpu.cases import MODELS, TRANSFORMERS, Case, adamw, fused
from tests.gpu.side_by_side import Planned, a_tier, differences, expect_known_failures, plainly, planned, traced

SMALL = [name for name in MODELS if name not in ("wide llama", "dropout inside")]


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_recorded_step(model: str, dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    case = Case(model, device, dtype)
    expect_known_failures(request, case)
    assert differences(planned(case, Rules.keep_all), plainly(case)) == []


@pytest.mark.parametrize("model", SMALL)
def test_everything_made_again(model: str, device: str) -> None:
    """Dropout draws what it drew the first time, and batch norm counts a batch once."""
    case = Case(model, device)
    steps = traced(case).recompute_all().steps
    assert len([s for s in steps if s.node >= 0]) > len(traced(case).nodes)
    assert differences(planned(case, Rules.recompute_all), plainly(case)) == []


def test_dropout_inside_recurrent_layers(device: str) -> None:
    """The same numbers; and no step where a library draws from a state of its own, which nobody can put back to draw
    again. Plain PyTorch makes that state at its first forward, so that it is there when the step is traced."""
    case = Case("dropout inside", device)
    expected = plainly(case)
    if device == "cpu":
        assert differences(planned(case, Rules.recompute_all), expected) == []
        return
    with pytest.raises(TraceError, match=r"layers\.0"):
        traced(case)


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("optimizer", [adamw, fused], ids=["default", "fused"])
def test_weights_and_states_stream(model: str, optimizer: object, device: str) -> None:
    case = Case(model, device, optimizer=optimizer)  # type: ignore[arg-type]
    assert differences(planned(case, Rules.stream_all, a_tier(device)), plainly(case)) == []


@pytest.mark.parametrize("model", TRANSFORMERS)
@pytest.mark.parametrize(("ahead", "lag"), [(0, 0), (8, 6)])
def test_just_in_time_and_long_before(model: str, ahead: int, lag: int, device: str) -> None:
    case = Case(model, device)
    found = planned(case, lambda one: one.stream_all(ahead=ahead, lag=lag), a_tier(device))
    assert differences(found, plainly(case)) == []


def test_a_traced_iteration_is_on_one_clock(device: str) -> None:
    tier = a_tier(device)
    training = Planned(Case("llama", device), Rules.stream_all, tier)
    training.step()
    program = training.programs[0]
    _, spans = trace_iteration(program, lambda: program(training.batches[0]))
    tier.close()
    steps = [s for s in spans if s.stream == "compute"]
    assert steps == sorted(steps, key=lambda s: s.start_s)
    assert all(s.start_s <= s.end_s for s in spans)
    if device == "cuda":
        copies = [s for s in spans if s.stream in ("offload", "reload")]
        assert copies
        end = max(s.end_s for s in steps)
        assert all(-1.0 < s.start_s < end + 1.0 for s in copies)
