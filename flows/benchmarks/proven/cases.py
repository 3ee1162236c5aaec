"""Makes the models whose plans are compared with the bound.

They are the main job, those of the remat benchmark, and a long one whose weights no machine here holds: its calls are
not run, and cost what the roofline says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from stowage.flows.benchmarks.remat.models import MODELS, build
from stowage.flows.pipeline.project import find_root
from stowage.flows.planning.configured import step_of
from stowage.flows.planning.step import Costed, Effort, Planning, StepToPlan, cost_step, target_device
from stowage.stages.ir.activations import device_budget, fixed_bytes
from stowage.stages.settings import load_settings
from stowage.stages.solve.program.chain import Execution
from stowage.stages.solve.program.of_trace import program_of
from stowage.stages.workload import build_workload

MAIN_JOB = "main_job"
"""The name of the main job of params.yaml; its budgets are shares of plain PyTorch's peak."""

LONG_CUT_SECONDS = 60.0
"""Seconds that cuts may take for the long model."""

EFFORT = Effort(seconds_per_call=0.05, min_samples=3)
"""Calls are measured briefly: plans and bounds are compared on the same costs."""

LONG = "llama2_7b"
"""Llama2-7B of 66 blocks, batch 4 × 512, AdamW."""

NAMES = (MAIN_JOB, *MODELS, LONG)

LABELS = {
    MAIN_JOB: "main job",
    "unet": "U-Net",
    "transformer": "`nn.Transformer` 6+6",
    "t5": "T5",
    "resnet101": "ResNet-101",
    "uno": "neural operator",
    "lstm": "LSTM",
    "mamba": "scan",
    "regnet": "RegNet",
    "mixer": "Mixer",
    "gpt2": "GPT-2",
    LONG: "Llama2-7B, 66 blocks",
}
"""The models' names for people, as the page of the remat benchmark has them."""


class ProvenCase:
    """One model, traced and with the cost of every call.

    Attributes:
        name: one of `NAMES`.
        step: the step that is planned.
        how: how it is planned.
        costed: its variants.
        keep_all_s: predicted time of a step that keeps everything.
    """

    def __init__(self, name: str, stores: Path, size: str = "small") -> None:
        self.name = name
        self.how = Planning(stores=stores, effort=EFFORT)
        if name == LONG:
            patient = replace(EFFORT, cut_seconds=LONG_CUT_SECONDS)
            self.how = Planning(stores=stores, effort=patient, costs="roofline", target=target_device("cpu", stores))
        self.step = _step_of(name, size)
        self.costed: Costed = cost_step(self.step, self.how)
        first = self.costed.variants[0]
        self.keep_all_s = sum(n.time_s for n in first.nodes)
        executions = [Execution(n.node, "keep") for n in first.nodes]
        self._keep_all_bytes = program_of(first.trace, first.nodes).peak_bytes(executions)

    def budget_bytes(self, share: float) -> int:
        """Return the budget of a share: of plain PyTorch's peak for the main job, else of the activation budget."""
        if self.name == MAIN_JOB:
            return int(share * self.costed.eager_peak_bytes)
        return device_budget(fixed_bytes(self.costed.variants[0].trace), self._keep_all_bytes, share)


def _step_of(name: str, size: str) -> StepToPlan:
    if name == MAIN_JOB:
        return step_of(load_settings(find_root() / "params.yaml"))
    if name == LONG:
        return _long(layers=2 if size == "tiny" else 32)
    case = build(name, "tiny" if size == "tiny" else "small")
    return StepToPlan(model=case.model, batch=case.batch, loss=case.loss)


def _long(layers: int) -> StepToPlan:
    shape = {"num_hidden_layers": layers, "dtype": "float32"}
    made = build_workload("llama", shape, batch_size=4, sequence_length=512, seed=0, fake=True)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
    return StepToPlan(model=made.model, batch=made.batch, optimizer=optimizer)
