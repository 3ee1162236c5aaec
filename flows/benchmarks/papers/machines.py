"""Describes machines and models of the OffMate preprint (its section 5), and what was measured with them there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stowage.stages.ir.costs import DeviceDescription
from stowage.stages.ir.machine import Link
from stowage.stages.runtime.files.weights import stand_ins
from stowage.stages.solve import LowerTier
from stowage.stages.workload import build_workload
from stowage.stages.workload.samples import sample_batch

GB, GIB = 10**9, 1 << 30

ADAM_TRAFFIC = 7
"""Bytes that an AdamW update in one precision moves per byte of weights: reads of g, w, m, v and writes of w, m, v."""

MANAGEMENT_S = 0.05
"""H: processor time that each step of the cycle takes (constraint 23), in seconds."""

STEPS = 2 * 34
"""Steps of the preprint's cycle for Llama2-7B: 32 layers, embedding and head, forward and backward."""

SEQUENCE = 512
"""Tokens of every sample."""


@dataclass(frozen=True)
class PaperMachine:
    """A machine of the preprint; what it does not state is marked as assumed.

    Attributes:
        device: rates of the GPU in float32.
        bf16_flops_per_s: FLOP/s in bfloat16.
        budget_bytes: the card's memory less the 2 GB that the preprint leaves.
        lower_tier: its pinned memory: the link as measured there, both directions at once as fast as each alone.
    """

    device: DeviceDescription
    bf16_flops_per_s: float
    budget_bytes: int
    lower_tier: LowerTier

    def device_for(self, dtype: str) -> DeviceDescription:
        """Return the device with the rate of a precision."""
        if dtype == "float32":
            return self.device
        name = f"{self.device.fingerprint}-{dtype}"
        return replace(self.device, fingerprint=name, flops_per_s=self.bf16_flops_per_s)


def _machine(
    name: str,
    *,
    memory: int,
    ram: int,
    flops: float,
    bf16_flops: float,
    traffic: float,
    link: float,
    gpu: float,
    cpu: float,
    iteration_s: float,
) -> PaperMachine:
    device = DeviceDescription(
        fingerprint=name.replace(" ", "-"),
        name=name,
        type="cuda",
        memory_bytes=memory,
        flops_per_s=flops,
        memory_copy_bytes_per_s=traffic,
        disk_read_bytes_per_s=1.0 * GB,
        disk_write_bytes_per_s=1.0 * GB,
        disk_duplex_bytes_per_s=1.0 * GB,
        update_bytes_per_s=ADAM_TRAFFIC * gpu,
        dispatch_s=5e-6,
    )
    free = 1 - STEPS * MANAGEMENT_S / iteration_s
    lower_tier = LowerTier(
        Link(link, link, 2 * link),
        capacity_bytes=int(0.9 * ram),
        cpu_update_bytes_per_s=ADAM_TRAFFIC * cpu * free,
    )
    return PaperMachine(device, bf16_flops, memory - 2 * GIB, lower_tier)


MACHINES = {
    "RTX 3060": _machine(
        "RTX 3060",
        memory=12 * GIB,
        ram=128 * GB,
        flops=8.45e12,
        bf16_flops=30e12,
        traffic=320 * GB,
        link=10.4 * GB,
        gpu=16.6 * GB,
        cpu=1.1 * GB,
        iteration_s=13.5,
    ),
    "RTX 3090": _machine(
        "RTX 3090",
        memory=24 * GIB,
        ram=256 * GB,
        flops=24e12,
        bf16_flops=60e12,
        traffic=840 * GB,
        link=18.8 * GB,
        gpu=40.9 * GB,
        cpu=1.6 * GB,
        iteration_s=10.3,
    ),
}
"""Machines by name. Stated: memory, RAM, link, α_G and α_C (bytes of weights per second), and the iteration's time.

In that time, less H for each step, the CPU updates. Assumed: memory traffic, and flops such that the base is near the
one that follows from the stated times and overheads (11.9 and 8.3 s for Llama2-7B in float32; 4.3 s for Mistral-7B in
bfloat16).
"""


@dataclass(frozen=True)
class PaperModel:
    """One fine-tuning task of the preprint: Adam, batch × 512.

    Attributes:
        machine: key of `MACHINES`.
        name: name of the model, for people.
        architecture: architecture of the model.
        overrides: overrides of its configuration.
        batch: number of samples.
        dtype: type of weights, gradients and states.
        lora: only adapters train.
        published: overhead measured there by case; for Table 1 from its samples per second.
    """

    machine: str
    name: str
    architecture: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 4
    dtype: str = "float32"
    lora: bool = False
    published: Mapping[str, float] = field(default_factory=dict)

    def build(self) -> tuple[nn.Module, Any, dict[str, torch.Tensor]]:
        """Build the model without memory for its weights, a batch, and layouts (see `StepToPlan`)."""
        settings = {**self.overrides, "dtype": self.dtype}
        if not self.lora:
            workload = build_workload(
                self.architecture, settings, batch_size=self.batch, sequence_length=SEQUENCE, seed=0, fake=True
            )
            return workload.model, workload.batch, {}
        with torch.device("meta"):
            config = AutoConfig.for_model(self.architecture, use_cache=False, **settings)
            base = AutoModelForCausalLM.from_config(config)
            adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = get_peft_model(base, adapters).train()
        layouts = stand_ins(model, "cpu")
        return model, sample_batch(model, self.batch, SEQUENCE, 0), layouts


TABLE_2 = (
    PaperModel(
        "RTX 3060",
        "Llama2-7B fp32",
        "llama",
        published={"all": 0.137, "no CPU update": 0.216, "no activation offload": 0.323},
    ),
    PaperModel(
        "RTX 3090",
        "Llama2-7B fp32",
        "llama",
        batch=8,
        published={"all": 0.243, "no CPU update": 0.274, "no activation offload": 0.423},
    ),
)
"""Tasks of Table 2, with its ablations; the thesis reports 20.3, 39.5 and 35.0% for the first."""

OTHERS = (
    PaperModel(
        "RTX 3060",
        "Llama2-13B bf16",
        "llama",
        {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
        dtype="bfloat16",
    ),
    PaperModel(
        "RTX 3060",
        "Phi-2 fp32",
        "phi",
        {
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 32,
            "vocab_size": 51200,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.1,
        },
    ),
    PaperModel("RTX 3060", "Llama2-7B LoRA fp32", "llama", lora=True),
    PaperModel(
        "RTX 3060",
        "Bloom-3B bf16",
        "bloom",
        {"n_layer": 30, "hidden_size": 2560, "n_head": 32, "vocab_size": 250880},
        dtype="bfloat16",
        published={"all": 2.35 / 1.68 - 1},
    ),
    PaperModel(
        "RTX 3060",
        "Mistral-7B bf16",
        "mistral",
        {"sliding_window": None},
        dtype="bfloat16",
        published={"all": 0.93 / 0.77 - 1},
    ),
    PaperModel(
        "RTX 3060",
        "Llama3-8B bf16",
        "llama",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        dtype="bfloat16",
        published={"all": 0.97 / 0.80 - 1},
    ),
)
"""Tasks of Figure 2, which gives no numbers, and of Table 1."""
