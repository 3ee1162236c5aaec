"""Training under plans made by hand equals plain PyTorch: what a GPU could do differently from a CPU."""

from __future__ import annotations

import pytest
import torch

from stowage.stages.device.tiers import NullTier, PinnedTier, Tier
from stowage.stages.runtime.measure import measure_program
from stowage.stages.runtime.tracing import trace_iteration
from tests.gpu.by_hand import ARCHITECTURES, Plan, Traced, adamw, build, eager

STEPS = 4


def losses_of(
    architecture: str, device: str, dtype: torch.dtype = torch.float32, max_grad_norm: float | None = None
) -> tuple[list[float], torch.Tensor]:
    """Of plain PyTorch, and what all weights are afterwards."""
    model, batch = build(architecture, device, dtype)
    optimizer = adamw(model)
    torch.manual_seed(3)
    losses = [eager(model, optimizer, batch, max_grad_norm) for _ in range(STEPS)]
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(
    architecture: str, device: str, plan: Plan, traced: Traced, tier: Tier | None, dtype: torch.dtype = torch.float32
) -> tuple[list[float], torch.Tensor]:
    """The same under a plan."""
    model, batch = build(architecture, device, dtype)
    program = traced.program(plan, model, adamw(model), tier)
    torch.manual_seed(3)
    losses = [float(program(batch)) for _ in range(STEPS)]
    if program.offloading is not None:
        program.offloading.fetch_all()
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def a_tier(device: str) -> Tier:
    return PinnedTier() if device == "cuda" else NullTier()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_recorded_step(architecture: str, dtype: torch.dtype, device: str) -> None:
    traced = Traced(architecture, device, dtype)
    losses, weights = trained(architecture, device, traced.keep_all(), traced, None, dtype)
    expected, eager_weights = losses_of(architecture, device, dtype)
    assert losses == expected
    assert torch.equal(weights, eager_weights)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything_made_again(architecture: str, device: str) -> None:
    """Dropout (GPT-2) draws what it drew the first time."""
    traced = Traced(architecture, device)
    plan = traced.recompute_all()
    assert len([s for s in plan.steps if s.node >= 0]) > len(traced.nodes)
    losses, weights = trained(architecture, device, plan, traced, None)
    expected, eager_weights = losses_of(architecture, device)
    assert losses == expected
    assert torch.equal(weights, eager_weights)


def test_the_generator_ends_where_eager_leaves_it(device: str) -> None:
    losses_of("gpt2", device)
    expected = torch.rand(4, device=device)
    traced = Traced("gpt2", device)
    trained("gpt2", device, traced.recompute_all(), traced, None)
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("ahead", "lag"), [(0, 0), (3, 2), (8, 6)])
def test_weights_and_states_stream(architecture: str, ahead: int, lag: int, device: str) -> None:
    traced = Traced(architecture, device)
    plan = traced.stream_all(ahead=ahead, lag=lag)
    tier = a_tier(device)
    losses, weights = trained(architecture, device, plan, traced, tier)
    expected, eager_weights = losses_of(architecture, device)
    tier.close()
    assert losses == expected
    assert torch.equal(weights, eager_weights)


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_updates_by_the_cpu_differ_by_rounding(max_grad_norm: float | None, device: str) -> None:
    """On the CPU they do not differ at all. Adam divides by the root of the second moment: where that is near zero one
    rounding counts in full, which the bound on weights allows for."""
    traced = Traced("llama", device, max_grad_norm=max_grad_norm)
    plan = traced.stream_all(below=True)
    assert any(s.kind == "update" for s in plan.steps)
    tier = a_tier(device)
    losses, weights = trained("llama", device, plan, traced, tier)
    expected, eager_weights = losses_of("llama", device, max_grad_norm=max_grad_norm)
    tier.close()
    if device == "cpu":
        assert losses == expected
        assert torch.equal(weights, eager_weights)
    else:
        assert losses == pytest.approx(expected, rel=1e-4)
        assert float((weights - eager_weights).abs().max()) < 1e-3


def test_streaming_takes_less_memory(device: str) -> None:
    """Predicted and measured; what the allocator rounds up and libraries keep is allowed for."""
    traced = Traced("llama", device)
    measured: list[int] = []
    predicted: list[int] = []
    for plan, tier in ((traced.keep_all(), None), (traced.stream_all(ahead=1, lag=0), a_tier(device))):
        model, batch = build("llama", device)
        optimizer = adamw(model)
        program = traced.program(plan, model, optimizer, tier)
        for _ in range(2):
            program(batch)
        measured.append(measure_program(program, model, optimizer, batch).peak_bytes)
        predicted.append(traced.judge(plan).peak_bytes)
        del program, model, optimizer
        if tier is not None:
            tier.close()
    assert predicted[1] < 0.75 * predicted[0]
    assert measured[1] < 0.85 * measured[0]


def test_a_traced_iteration_is_on_one_clock(device: str) -> None:
    traced = Traced("llama", device)
    model, batch = build("llama", device)
    tier = a_tier(device)
    program = traced.program(traced.stream_all(), model, adamw(model), tier)
    program(batch)
    _, spans = trace_iteration(program, lambda: program(batch))
    tier.close()
    steps = [s for s in spans if s.stream == "compute"]
    assert steps == sorted(steps, key=lambda s: s.start_s)
    assert all(s.start_s <= s.end_s for s in spans)
    if device == "cuda":
        copies = [s for s in spans if s.stream in ("offload", "reload")]
        assert copies
        end = max(s.end_s for s in steps)
        assert all(-1.0 < s.start_s < end + 1.0 for s in copies)
