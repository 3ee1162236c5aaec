"""Refuses Trainers whose training step cannot be planned."""

from __future__ import annotations

from typing import Any

from stowage.flows.api.trainer.ranks import other_than_ddp
from stowage.stages.ir.errors import ParameterError


def refuse(trainer: Any, *, offloads: bool) -> None:
    """Refuse a Trainer that spreads the step over several devices, or scales its loss.

    Args:
        trainer: a `transformers.Trainer`.
        offloads: weights may be offloaded.

    Raises:
        ParameterError: its training step cannot be planned; the text says why.
    """
    arguments = trainer.args
    reasons = {
        "it shards the model with FSDP": getattr(trainer, "is_fsdp_enabled", False),
        "it runs DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "one process trains on several devices (start one for each, with accelerate launch or torchrun)": getattr(
            arguments, "n_gpu", 1
        )
        > 1,
        "fp16 scales the loss by what earlier steps gave (use bf16)": trainer.accelerator.scaler is not None,
        "bf16_full_eval and fp16_full_eval cast the weights, which may be offloaded": offloads
        and (getattr(arguments, "bf16_full_eval", False) or getattr(arguments, "fp16_full_eval", False)),
        "torch_compile hides the model's operations": getattr(arguments, "torch_compile", False),
    }
    if other := other_than_ddp(trainer):
        reasons[other] = True
    for reason, holds in reasons.items():
        if holds:
            raise ParameterError(f"The training step of this Trainer cannot be planned: {reason}.")
