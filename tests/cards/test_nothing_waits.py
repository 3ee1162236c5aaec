"""A step asks no tensor for its numbers: on a card the host would wait for the device, and then the device for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stowage.flows import fit
from stowage.stages.ir.run import StepRecord
from stowage.stages.train.comparison import metrics_of
from tests.zoo import ZOO

aten: Any = torch.ops.aten
ASKS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default}
ADAMW: dict[str, dict[str, Any]] = {"default": {}, "fused": {"fused": True}, "foreach": {"foreach": True}}


class Waits(TorchDispatchMode):
    """Notes who asks for numbers, but for the counters of steps, which live in the host."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.found: list[str] = []
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            counters = [s.get("step") for s in self._optimizer.state.values()]
            if not any(args[0] is c or args[0].data_ptr() == c.data_ptr() for c in counters if c is not None):
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ADAMW)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "llama"])
def test_a_step_asks_for_no_numbers(name: str, how: str, fit_stores: Any) -> None:
    model, batch, loss = ZOO[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **ADAMW[how])
    step = fit(
        model, batch, optimizer, loss=loss, device_budget="1GiB", max_grad_norm=1.0, quick=True, cache_dir=fit_stores,
        check="never", say=lambda text: None,
    )  # fmt: skip
    step(batch)
    with Waits(optimizer) as waits:
        for _ in range(2):
            step(batch)
    assert waits.found == []
    with Waits(optimizer) as waits:
        float(step(batch))
    assert waits.found == ["aten._local_scalar_dense.default"], "who asks is seen"


def test_metrics_of_a_card_have_its_allocators_peaks() -> None:
    def record(peak: int, *more: int) -> StepRecord:
        return StepRecord(0, 1.0, float("nan"), 0.1, 0.2, float("nan"), peak, *more)

    class Summary:
        device_budget_bytes, device_peak_bytes, step_time_s, reserve_bytes = 100, 90, 0.1, 7

    found = metrics_of(Summary(), [record(80, 70, 95, 1), record(-1), record(85, 75, 98, 2)], [])  # type: ignore[arg-type]
    assert found["measured_peak_bytes"] == 85
    assert (found["requested_peak_bytes"], found["reserved_peak_bytes"]) == (75, 98)
    assert (found["allocation_retries"], found["reserve_bytes"]) == (3, 7)
    assert "reserved_peak_bytes" not in metrics_of(Summary(), [record(80)], [])  # type: ignore[arg-type]
