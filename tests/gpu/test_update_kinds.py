"""Updates of every kind of AdamW, on the device, in the lower tier, and by turns, beside plain PyTorch.

On a GPU the kinds keep their number of steps in different places: fused and capturable ones on the device, the others
in the host's memory, and whatever the CPU has updated comes back from there.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from stowage.flows.planning.by_rules import Rules
from stowage.stages.runtime.masters import MasterWeights
from tests.gpu.cases import Case, MakeOptimizer, adamw, capturable, foreach, fused
from tests.gpu.side_by_side import Planned, a_tier, assert_close, differences, plainly, planned, traced

KINDS = {"default": adamw, "fused": fused, "foreach": foreach, "capturable": capturable}

masters = partial(MasterWeights, inner=torch.optim.AdamW, lr=1e-2)
fused_masters = partial(MasterWeights, inner=torch.optim.AdamW, lr=1e-2, fused=True)

cpu_updates = partial(Rules.stream_all, cpu_updates=True)


def case_of(kind: str, device: str, model: str = "llama", max_grad_norm: float | None = None) -> Case:
    if kind == "capturable" and device == "cpu":
        pytest.skip("PyTorch refuses capturable optimizers on a CPU")
    return Case(model, device, optimizer=KINDS[kind], max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_device(kind: str, device: str) -> None:
    case = case_of(kind, device, "gpt2")
    assert differences(planned(case, Rules.stream_all, a_tier(device)), plainly(case)) == []


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_by_the_cpu(kind: str, max_grad_norm: float | None, device: str) -> None:
    case = case_of(kind, device, max_grad_norm=max_grad_norm)
    assert any(s.kind == "update" for s in cpu_updates(traced(case)).steps)
    assert_close(case, planned(case, cpu_updates, a_tier(device)), plainly(case))


@pytest.mark.apart
@pytest.mark.parametrize("kind", KINDS)
def test_by_turns(kind: str, device: str) -> None:
    """The same parameters are updated by the CPU, then on the device, then where nothing moves, and so on: states
    change places, and their number of steps is found wherever the next update looks for it: a fused kernel that found
    it in the host's memory would read where it may not."""
    case = case_of(kind, device)
    tier = a_tier(device)
    training = Planned(case, cpu_updates, tier, [Rules.stream_all, cpu_updates, Rules.keep_all])
    assert_close(case, training.train(8), plainly(case, 8))
    tier.close()


@pytest.mark.parametrize("make", [masters, fused_masters], ids=["default", "fused"])
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_float32_masters_of_bfloat16_weights(make: MakeOptimizer, where: str, device: str) -> None:
    case = Case("llama", device, torch.bfloat16, optimizer=make)
    states = {s.name.partition("::")[2] for s in traced(case).trace.storages if s.role == "state"}
    assert "master" in states
    if where == "device":
        assert differences(planned(case, Rules.stream_all, a_tier(device)), plainly(case)) == []
    else:  # a weight may round to its other neighbour in bfloat16
        assert_close(case, planned(case, cpu_updates, a_tier(device)), plainly(case), part=0.1, loss=2e-2)
