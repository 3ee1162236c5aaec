"""Steps with cuDNN's recurrent layers: traced, planned and written here, where none of their kernels runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stowage.flows.planning.costed import cost_traces
from stowage.flows.planning.step import QUICK, Planning, plan_costed
from stowage.stages.ir.errors import Infeasible, TraceError
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.kernels import SUBSTITUTES, Output
from stowage.stages.profile import CostStore, profile_variants
from stowage.stages.profile.returned import differ, recorded_outputs
from stowage.stages.rewrite import variants_of
from stowage.stages.runtime.whitelist import checked
from stowage.stages.simulate.stored import check_stored
from stowage.stages.trace import trace_step
from tests.cards.attention import CARD
from tests.cards.recurrent import LSTM, SAMPLES, STEPS, WIDTH, Recurrent, aten, lstm_on_a_card

FORWARD, BACKWARD = "aten._cudnn_rnn.default", "aten._cudnn_rnn_backward.default"
GATES = 4 * WIDTH
MATRIX = GATES * WIDTH


def of(trace: TraceTables, target: str) -> list[Call]:
    return [c for c in trace.calls if c.target == target]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "scattered"])
def test_gradients_of_weights_share_a_buffer(flat: bool) -> None:
    trace = lstm_on_a_card(flat=flat)
    assert len(of(trace, FORWARD)) == len(of(trace, BACKWARD)) == 2
    for call in of(trace, FORWARD):
        output, buffer = trace.values[call.returns[0]], trace.values[call.returns[4]]
        assert output.stride == (WIDTH, SAMPLES * WIDTH, 1), "the kernel has steps first"
        assert (trace.storages[buffer.storage].role == "parameter") == flat
        assert not call.is_random
    for call in of(trace, BACKWARD):
        assert call.groups == (-1, -1, -1, 8)
        made = [trace.values[v] for v in call.returns]
        assert made[0].stride == (WIDTH, SAMPLES * WIDTH, 1)
        (storage,) = {value.storage for value in made[3:]}
        assert len({value.storage for value in made}) == 4
        assert trace.storages[storage].nbytes == 4 * (4 * MATRIX + 4 * GATES)
        layer = [0, MATRIX, 2 * MATRIX, 2 * MATRIX + GATES]
        apart = [0, MATRIX, 4 * MATRIX, 4 * MATRIX + GATES]
        second = [2 * MATRIX, 3 * MATRIX, 4 * MATRIX + 2 * GATES, 4 * MATRIX + 3 * GATES]
        expected = [*layer, *(start + 2 * MATRIX + 2 * GATES for start in layer)] if flat else [*apart, *second]
        assert [value.offset for value in made[3:]] == expected


def test_without_biases_gradients_are_copies() -> None:
    trace = lstm_on_a_card(bias=False, flat=False)
    for call in of(trace, BACKWARD):
        assert call.groups == (-1, -1, -1, 4)
        assert len({trace.values[v].storage for v in call.returns}) == 7


def test_what_shares_memory_is_compared() -> None:
    """With a memory of its own, or that of another output; but not by what the step does without."""
    trace = lstm_on_a_card(flat=False)
    call = of(trace, BACKWARD)[0]
    said = recorded_outputs(call, trace)
    assert not differ(said, call, trace)
    assert [o.output for o in said if o] == [-1, -1, -1, -1, *[3] * 7]
    assert all(Output.parse(o.text) == o for o in said if o)
    for wrong in ({"output": 1}, {"output": -1, "nbytes": 256}):
        assert differ((*said[:-1], replace(said[-1], **wrong) if said[-1] else None), call, trace)
    without = replace(call, returns=(*call.returns[:3], -1, *call.returns[4:]))
    assert not differ(said, without, trace)


@pytest.mark.parametrize("cell", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_not_asked_for(cell: bool, packed: bool) -> None:
    """Gradients of input and states are made all the same, those of weights are not; of no gradient comes none."""
    backward = SUBSTITUTES[aten._cudnn_rnn_backward.default]
    with FakeTensorMode():
        x = torch.empty((10, WIDTH) if packed else (SAMPLES, STEPS, WIDTH))
        weights = [torch.empty(GATES, WIDTH), torch.empty(GATES, WIDTH), torch.empty(GATES), torch.empty(GATES)]
        state = torch.empty(1, SAMPLES, WIDTH)
        given = (x, weights, 4, torch.empty(2 * MATRIX + 2 * GATES), state, state if cell else None, x)
        form = (LSTM, WIDTH, 0, 1, True, 0.0, True, False, [4, 3, 3] if packed else [], None, torch.empty(0))
        dx, dhx, dcx, dw = backward(*given, x, None, None, *form, [False] * 4)
        assert dx.shape == x.shape
        assert dx.is_contiguous() == packed
        assert dhx.shape == state.shape
        assert (dcx is None) != cell
        assert dw == []
        assert backward(*given, None, None, None, *form, [True] * 4) == (None, None, None, [None] * 4)


@pytest.mark.parametrize(
    "how", [{}, {"flat": False}, {"frozen": True}, {"updated": False}], ids=["flat", "scattered", "frozen", "left"]
)
@pytest.mark.parametrize("part", [10.0, 0.3], ids=["all", "least"])
def test_a_card_is_planned_for(part: float, how: dict[str, bool], tmp_path: Path) -> None:
    """A backward runs once: it writes into what its forward keeps for it."""
    trace = lstm_on_a_card(**how)
    traces = variants_of(trace)
    costs = profile_variants(traces.values(), CARD, CostStore(tmp_path), costs="roofline")
    costed = cost_traces(traces, costs, trace, CARD)
    once = [n for n in costed.variants[0].nodes if any(trace.calls[c].target == BACKWARD for c in n.calls)]
    assert len(once) == 2
    assert all(n.once for n in once)
    budget = int(part * costed.eager_peak_bytes)
    try:
        planned = plan_costed(costed, budget, Planning(stores=tmp_path, effort=QUICK))
    except Infeasible as error:
        budget = error.smallest_feasible_bytes
        planned = plan_costed(costed, budget, Planning(stores=tmp_path, effort=QUICK))
    check_stored(planned.trace, planned.nodes, planned.rows, planned.slots, planned.summary)
    checked(planned.source, "step.py", {c.target for c in planned.trace.calls})
    assert planned.summary.device_peak_bytes <= budget
    assert planned.source.count("aten._cudnn_rnn_backward.default(") == 2


def test_dropout_inside_is_refused() -> None:
    """cuDNN draws it from a state that no generator has."""
    with pytest.raises(TraceError, match=r"Module 'first' .*dropout=0 and nn.Dropout between single layers"):
        lstm_on_a_card(dropout=0.1)
    torch.manual_seed(0)
    model = Recurrent(dropout=0.1).eval()
    ids = torch.randint(0, 8, (SAMPLES, STEPS))
    for part in (model.first, model.second):
        part.train().dropout = 0.0
    trace = trace_step(model, (ids,), loss=lambda loss, _: loss)
    assert len(of(trace, BACKWARD)) == 2


def test_so_is_the_seed_of_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch draws it from the card's generator before the layer's first call, and after `manual_seed`."""
    generator = torch.Generator()

    class Seeds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            return super().forward(x)

    def trace() -> None:
        trace_step(nn.Sequential(Seeds(2, 2)), (torch.zeros(1, 2),), loss=lambda y, _: y.sum())

    with pytest.raises(TraceError, match=r"a torch\.Generator of its own"):
        trace()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    with pytest.raises(TraceError, match=r"Module '0' .*inside a recurrent layer of cuDNN's"):
        trace()


LOOKS = """
def looks(weight):
    import torch
    return torch.empty(0).set_(weight.untyped_storage()).size(0)
"""


@pytest.mark.parametrize("file", [torch.nn.modules.rnn.__file__, "elsewhere.py"], ids=["a layer", "elsewhere"])
def test_a_layer_looks_where_its_weights_lie(file: str) -> None:
    """As the operators behind `nn.LSTM` do on a card. Elsewhere the answer might matter."""
    found: dict[str, Any] = {}
    exec(compile(LOOKS, file, "exec"), found)

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert found["looks"](self.weight) < self.weight.numel(), "not in one buffer"
            return super().forward(x)

    def trace() -> TraceTables:
        return trace_step(nn.Sequential(Looks(2, 2)), (torch.zeros(1, 2),), loss=lambda y, _: y.sum())

    if file == "elsewhere.py":
        with pytest.raises(TraceError, match="storage"):
            trace()
    else:
        assert not any("set_" in c.target for c in trace().calls)
