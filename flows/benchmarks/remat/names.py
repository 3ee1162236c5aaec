"""Constants that the processes of the benchmark share; no torch, so that its command starts fast."""

from __future__ import annotations

from typing import Literal

Size = Literal["tiny", "small"]
"""Size of a model: for tests, or for steps of about a second on a CPU."""

EAGER = "plain PyTorch"
CHECKPOINTING = "gradient_checkpointing_enable"
EVERY_ROOT = "torch.utils.checkpoint"
MEMORY_BUDGET = "activation_memory_budget"

AUTO = "auto"
"""The method that the others are compared with."""

TITLES = {
    "gpt2": "GPT-2",
    "transformer": "`nn.Transformer` 6+6",
    "unet": "U-Net",
    "mixer": "Mixer",
    "uno": "neural operator",
    "mamba": "scan",
    "lstm": "LSTM",
    "t5": "T5",
    "regnet": "RegNet",
    "resnet101": "ResNet-101",
}
"""Names of models for people, in the order of tables."""
