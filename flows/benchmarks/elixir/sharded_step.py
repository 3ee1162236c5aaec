"""Traces a GPT-2 of the paper for one of `n` ranks, with costs that sum up to those of its table of groups.

Weights and gradients are in bfloat16; the optimizer's states are a float32 master and Adam's two, 12 bytes an element.
The model is that of `transformers`, with a GELU in one kernel as the table's 42 bytes a token have it, without dropout.

Costs of calls are estimated from FLOPs and bytes, and then scaled: those of the layers' forward by one factor, so that
they sum up to the table's forward of its layers; those of everything else in forward, the head above all, by another,
to the root's forward; and those of backward by a third, to twice both together. The table's backward of a layer is
longer by a forward: that is recomputation, which is for the plan to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from stowage.flows.benchmarks.elixir.models import SEQUENCE, Gpt2
from stowage.flows.planning.costed import Costed, cost_traces
from stowage.flows.planning.effort import Effort
from stowage.stages.ir.collectives import COLLECTIVES
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.optimizers import KnownOptimizer
from stowage.stages.profile import CostStore, profile_trace
from stowage.stages.runtime.masters import MasterWeights
from stowage.stages.trace import MicroBatch, record_step, with_updates
from stowage.stages.workload import build_workload

ROUNDS = 20
"""Rounds of scaling: a call that forward and backward have in common is in both sums."""

Part = Literal["layers", "rest", "backward"]
"""Forward of the layers, the rest of forward, and backward."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the forward of all layers, and of everything else in forward; backward takes twice as long."""

    layers_s: float
    rest_s: float

    def of(self, part: Part) -> float:
        """Return the seconds of a part."""
        return {"layers": self.layers_s, "rest": self.rest_s, "backward": 2 * (self.layers_s + self.rest_s)}[part]


def step_times(model: Gpt2, batch: int, matmul_flops: float, memory_bytes_per_s: float) -> StepTimes:
    """Return the times that the model's table of groups has."""
    root, *layers = model.groups(batch, matmul_flops, memory_bytes_per_s)
    return StepTimes(sum(g.forward_s for g in layers), root.forward_s)


def sharded_trace(model: Gpt2, batch: int, ranks: int) -> TraceTables:
    """Trace a step of the model, sharded over ranks."""
    settings = {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "vocab_size": model.vocabulary,
        "n_positions": model.positions,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }
    workload = build_workload("gpt2", settings, batch_size=batch, sequence_length=SEQUENCE, seed=0, fake=True)
    recorded = record_step(workload.model, workload.batch)
    optimizer = KnownOptimizer(MasterWeights(workload.model.parameters(), torch.optim.AdamW, lr=1e-4))
    return with_updates(recorded, workload.model, optimizer=optimizer, micro_batch=MicroBatch(ranks=ranks))


def sharded_step(
    trace: TraceTables, times: StepTimes, device: DeviceDescription, effort: Effort, stores: Path
) -> Costed:
    """Cost a trace and cut it into blocks.

    Args:
        trace: the sharded step.
        times: times that its parts take.
        device: one rank's device.
        effort: limits on planning.
        stores: a folder for the store of costs.
    """
    known = profile_trace(trace, device, CostStore(stores / "costs"), costs="roofline")
    return cost_traces({"plain": trace}, scaled(known, trace, times), trace, device, effort.grid.max_exact_nodes)


def scaled(costs: Sequence[Cost], trace: TraceTables, times: StepTimes) -> list[Cost]:
    """Return costs that sum up to the times of the parts."""
    counted: dict[str, dict[Part, int]] = {}
    for call, part in _parts(trace):
        of_call = counted.setdefault(call.signature, {})
        of_call[part] = of_call.get(part, 0) + 1
    seconds = {c.signature: c.time_s for c in costs}
    owner = {signature: max(found, key=lambda p: found[p]) for signature, found in counted.items()}
    factors = dict.fromkeys(sorted({*owner.values()}), 1.0)
    for _ in range(ROUNDS):
        sums = _sums(counted, owner, seconds, factors)
        factors = {part: f * times.of(part) / sums[part] for part, f in factors.items()}
    return [replace(c, time_s=c.time_s * factors[owner[c.signature]]) if c.signature in owner else c for c in costs]


def _parts(trace: TraceTables) -> Iterator[tuple[Call, Part]]:
    """Yield every call that computes, with the part of the step that it belongs to."""
    for call in trace.calls:
        if call.phase != "update" and call.target not in COLLECTIVES:
            in_layer = ".h." in f".{call.module}."
            yield call, "backward" if call.phase == "backward" else "layers" if in_layer else "rest"


def _sums(
    counted: Mapping[str, Mapping[Part, int]],
    owner: Mapping[str, Part],
    seconds: Mapping[str, float],
    factors: Mapping[Part, float],
) -> dict[Part, float]:
    found = dict.fromkeys(factors, 0.0)
    for signature, parts in counted.items():
        for part, count in parts.items():
            if part in found:
                found[part] += count * seconds[signature] * factors[owner[signature]]
    return found
