"""Measuring on several batches takes the memory of one at a time, without waiting for the garbage collector."""

from __future__ import annotations

import gc

from stowage.stages.device import device_of
from stowage.stages.sensitivity import StepTensors, gradient_errors
from stowage.stages.trace import trace_step
from stowage.stages.workload.samples import sample_batch
from tests.configurations.alongside import small_gpt2


def test_each_batch_takes_the_memory_of_the_one_before() -> None:
    model = small_gpt2(n_embd=256, n_positions=64)
    batches = [sample_batch(model, 8, 64, seed) for seed in range(4)]
    trace = trace_step(model, batches[0])
    live = [StepTensors.of(model, batch) for batch in batches]

    def peak(count: int) -> int:
        return device_of("cpu").measure(lambda: gradient_errors(trace, ["int8"], live[:count]), []).peak_bytes

    gc.collect()
    gc.disable()
    try:
        two, four = peak(2), peak(4)
    finally:
        gc.enable()
    assert four <= 1.05 * two
    weights = sum(p.nbytes for p in model.parameters())
    assert peak(1) <= two + 1.05 * weights  # moved copies
