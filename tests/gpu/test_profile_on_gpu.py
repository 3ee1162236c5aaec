"""Profiling on the device that trains: it runs to its end, on arguments that kernels can take, and measures the bytes
that the trace says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stowage.stages.ir.costs import Cost
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.kernels import Around
from stowage.stages.profile import arguments, measure
from tests.gpu.cases import Case, adamw, fused
from tests.gpu.profiling import PointsOutsideError, profile

MIB = 1 << 20
NUMBER = 8
BLOCK = 512
"""What CUDA's allocator rounds up to."""


@pytest.mark.apart
@pytest.mark.parametrize("model", ["gpt2", "llama", "convolutions", "recurrent", "tables"])
def test_every_call_can_be_measured(model: str, device: str, tmp_path: Path) -> None:
    """GPT-2 has dropout in attention, whose fused kernel keeps its seed in the host's memory; tables have one row."""
    half = model == "llama"
    found = profile(Case(model, device, torch.bfloat16 if half else torch.float32, fused if half else adamw), tmp_path)
    trace = found.trace
    assert trace.meta.device == device
    assert found.costs.keys() >= {c.signature for c in trace.calls}
    costs = [found.costs[c.signature] for c in trace.calls]
    assert all(c.source == "measured" and c.time_s >= 0 and c.workspace_bytes >= 0 for c in costs)
    work = [c.time_s for c, call in zip(costs, trace.calls, strict=True) if not call.is_view]
    assert sum(work) > 0, "views alone launch no kernel"
    state = sum(s.nbytes for s in trace.storages if s.role == "state" and s.nbytes > 4)
    assert state == 2 * sum(s.nbytes for s in trace.storages if s.role == "parameter")
    wrong = [_told(call, trace, found.costs[call.signature]) for call in trace.calls if call.phase != "update"]
    assert [text for text in wrong if text] == []
    if model == "recurrent" and device != "cpu":  # which says only when it runs how many bytes its backward needs
        assert any(call.target.startswith("aten._cudnn_rnn.") for call in trace.calls)


def _told(call: Call, trace: TraceTables, cost: Cost) -> str:
    """Empty if a call makes the bytes that the trace has for it, as the allocator rounds them. Seed and offset of fused
    attention, of 8 bytes each, are in the host's memory."""
    of_call = {v.storage for v in trace.values if v.call == call.call}
    earlier = {v.storage for v in trace.values if v.call < call.call}
    made = [trace.storages[s].nbytes for s in of_call - earlier]
    least, most = sum(made), sum(made)
    if trace.meta.device == "cuda":
        least = sum(n for n in made if n > NUMBER)
        # Large blocks are split only if more than 1 MiB would remain.
        most = sum(-(-n // BLOCK) * BLOCK + (MIB if n > MIB else 0) for n in made)
    if least <= cost.output_bytes <= most:
        return ""
    return f"{call.target} makes {cost.output_bytes} bytes, the trace has {made}"


@pytest.mark.parametrize("model", ["tables", "gpt2"])
def test_indices_are_looked_at(model: str, tmp_path: Path) -> None:
    """What stands between profiling and a dead context does its work, on the CPU."""
    assert profile(Case(model, "cpu"), tmp_path).indices > 10


def test_an_index_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As made up by whom the sizes of tables are unknown."""
    monkeypatch.setattr(arguments, "around_of", lambda call, trace: Around())
    monkeypatch.setattr(measure, "moved_inside", lambda target, args: False)
    with pytest.raises(PointsOutsideError, match="indices 0 … 1 into 1"):
        profile(Case("tables", "cpu"), tmp_path)
