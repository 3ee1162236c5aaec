"""Trains under a memory limit of the kernel.

`python -m stowage.flows.benchmarks.limits.limited` takes one JSON object and answers by step.

Both contestants build the model on the meta device and read its weights from one file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stowage.flows.api.fit import fit
from stowage.stages.ir.command import Parser
from stowage.stages.workload import token_stream
from stowage.stages.workload.data import batch_at

VOCABULARY = 256


def build(layers: int, width: int, length: int) -> nn.Module:
    """Build a GPT-2 over bytes, on the meta device, in training mode."""
    config = AutoConfig.for_model(
        "gpt2",
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=VOCABULARY,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def eager(model: nn.Module, weights: str) -> Callable[[Any], torch.Tensor]:
    """Return a step of plain PyTorch with AdamW."""
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    with safe_open(weights, framework="pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    """Train, and print loss and seconds of each step."""
    parser = Parser(__doc__)
    parser.add_argument("request", help="what to train, as JSON")
    request = json.loads(parser.parse_args().request)
    length, batch_size = request["length"], request["batch"]
    model = build(request["layers"], request["width"], length)
    stream = token_stream("pydoc_topics", None, None, vocabulary=VOCABULARY)

    def batches(iteration: int) -> Any:
        return batch_at(stream, batch_size, length, 0, iteration)

    if request["budget"] is None:
        step: Callable[[Any], torch.Tensor] = eager(model, request["weights"])
    else:
        planned = fit(
            model,
            batches(0),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            device_budget=request["budget"],
            offload_dir=request["offload_dir"],
            weights=request["weights"],
            cache_dir=request["store"],
            quick=True,
        )
        plan = planned.plan
        about = {
            "method": plan.method,
            "device_peak_bytes": plan.device_peak_bytes,
            "step_time_s": plan.step_time_s,
            "lower_bound_s": plan.lower_bound_s,
            "rates_bound_s": plan.rates_bound_s,
            "wait_s": plan.wait_s,
            "offload_bytes": plan.offload_bytes,
            "reload_bytes": plan.reload_bytes,
        }
        print(json.dumps(about), flush=True)
        step = planned
    torch.manual_seed(0)
    for iteration in range(request["steps"]):
        batch = batches(iteration)
        start = time.perf_counter()
        loss = float(step(batch))
        print(json.dumps({"loss": loss, "time_s": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
