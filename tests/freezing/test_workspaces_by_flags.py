"""Workspaces by flags are the sums over guards that say so, and are measured with the results that a mask leaves."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stowage.stages.device import device_of
from stowage.stages.freezing.workspaces import Workspace
from stowage.stages.ir.flags import flag_count, together
from stowage.stages.ir.masked_bytes import MaskedBytes
from stowage.stages.ir.units import ALWAYS, bit, joined
from stowage.stages.profile.measure import measure_call
from stowage.stages.trace import trace_step

UNITS = 4


@st.composite
def _workspaces(draw: Any) -> Workspace:
    guards = st.sets(st.sampled_from([bit(u) for u in range(UNITS)]), min_size=1).map(lambda own: joined(*own))
    flags = draw(st.lists(guards | st.just(ALWAYS), max_size=3))
    row = joined(draw(guards), *flags) if draw(st.booleans()) else draw(guards | st.just(ALWAYS))
    nbytes = draw(st.lists(st.integers(0, 9), min_size=1 << len(flags), max_size=1 << len(flags)))
    return Workspace(row, tuple(flags), tuple(nbytes))


@given(_workspaces())
def test_the_sum_over_guards_is_what_the_row_takes(workspace: Workspace) -> None:
    by_guard = MaskedBytes(0, workspace.by_guard())
    for mask in range(1, 2 << UNITS, 2):
        assert by_guard.under(mask) == (workspace.under(mask) if workspace.guard & mask else 0)


def test_calls_of_a_node_one_after_the_other() -> None:
    assert together([(3,), (1, 5), (4, 0)]) == (4, 5, 3, 5)
    assert together([]) == (0,)


def test_a_convolution_is_measured_under_every_choice_of_its_results() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    batch = torch.randn(2, 8, 32, 32)
    trace = trace_step(
        model, (batch,), loss=lambda out, _: out.square().mean(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    backward = [c for c in trace.calls if c.target == "aten.convolution_backward.default"]
    assert [flag_count(c.target, c.arguments) for c in backward] == [3, 2]
    device = device_of("cpu")
    for call in backward:
        alone = measure_call(call, trace, device, "cpu")
        assert len(alone.flagged_bytes) == 1 << flag_count(call.target, call.arguments)
        assert alone.flagged_bytes[-1] == alone.workspace_bytes
        assert alone.flagged_bytes[0] == 0
        assert min(alone.flagged_bytes) >= 0
