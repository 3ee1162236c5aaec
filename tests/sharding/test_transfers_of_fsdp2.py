"""What FSDP2 itself copies between host and device, counted, is what the cost model and the simulator count.

There is no device here to copy to, so the calls are counted that would copy: `Tensor.to(device)` in FSDP2's own files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from stowage.stages.formulations.sharding.cost_model import CostModel
from stowage.stages.formulations.sharding.memory import State
from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import ParallelMachine, ParameterGroup
from tests.sharding.processes import on_ranks

RANKS, SIZE, LAYERS = 2, 16, 3
RELOADS, OFFLOADS = "_fsdp_param.py", "_fsdp_collectives.py"
"""Files of FSDP2 that copy shards to the device, and gradients to the host."""


def copied(on_host: bool, keep: bool, frozen: bool, micro_batches: int) -> dict[str, int]:
    """Count the bytes of one rank in one step, by file of FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    if frozen:
        model[0].requires_grad_(False)
    for layer in model:
        fully_shard(
            layer,
            reshard_after_forward=not keep,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            offload_policy=CPUOffloadPolicy(pin_memory=False) if on_host else OffloadPolicy(),
        )
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    bytes_of: dict[str, int] = {RELOADS: 0, OFFLOADS: 0}
    original = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        file = Path(sys._getframe(1).f_code.co_filename).name
        if file in bytes_of and arguments and isinstance(arguments[0], torch.device):
            bytes_of[file] += tensor.numel() * tensor.element_size()
        return original(tensor, *arguments, **options)

    def step() -> None:
        for _ in range(micro_batches):
            model(torch.ones(2, SIZE, requires_grad=True)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    try:
        step()
    finally:
        torch.Tensor.to = original  # type: ignore[method-assign]
    return bytes_of


Case = tuple[bool, bool, bool, int]
"""On the host, kept, with a frozen group, number of micro-batches."""

CASES: list[Case] = [
    (False, False, False, 1),
    (True, False, False, 1),
    (True, True, False, 1),
    (True, False, True, 1),
    (True, True, False, 2),
]


def copied_in_all(cases: list[Case]) -> list[dict[str, int]]:
    """Count every case, one after the other."""
    return [copied(*case) for case in cases]


def counted(case: Case) -> tuple[float, float]:
    """What the cost model counts for all ranks: bytes to the devices and back, at one byte per second."""
    on_host, keep, frozen, micro_batches = case
    elements = SIZE * SIZE
    groups = tuple(
        ParameterGroup(
            group=i,
            modules=(f"{i}",),
            parameters=("weight",),
            elements=elements,
            trainable=0 if frozen and i == 0 else elements,
            stored_bytes=4,
            compute_bytes=2,
            state_bytes=8,
            forward_s=1.0,
            backward_s=1.0,
            saved_bytes=0,
            forward_peak_bytes=0,
            backward_peak_bytes=0,
        )
        for i in range(LAYERS)
    )
    machine = ParallelMachine("two", RANKS, 10**6, 10**6, 1.0, 0.0, 1.0, 1.0, 2.0, 1.0, 1.0)
    costs = CostModel(ShardingProblem(groups, machine, 10**6, 10**6, micro_batches))
    state = State(on_host, keep)
    reloads = sum(costs.forward(i, state).reload_s + costs.backward(i, state).reload_s for i in range(LAYERS))
    offloads = sum(costs.backward(i, state).offload_s for i in range(LAYERS))
    assert reloads + offloads == sum(costs.link_bytes(i, state) for i in range(LAYERS))
    return micro_batches * reloads, micro_batches * offloads


def test_fsdp2_copies_stored_weights_for_every_gather_and_stored_gradients_back() -> None:
    found = on_ranks(RANKS, copied_in_all, CASES)
    for case, ranks in zip(CASES, zip(*found, strict=True), strict=True):
        assert (sum(f[RELOADS] for f in ranks), sum(f[OFFLOADS] for f in ranks)) == counted(case), case
