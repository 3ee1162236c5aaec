"""A Trainer on each rank that freezes or keeps codes: `stow`'s, and plain ones beside it; run by `test_frozen_trainer`.

`python -m tests.sharding.frozen_trainer beside|freezes|packs FOLDER` on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from stowage import stow
from stowage.flows import Freeze, Lossy
from stowage.stages.ir.units import Unit
from stowage.stages.rewrite.lossy import saved as saved_module
from tests.freezing.beside import units_in
from tests.sharding.codes_beside_ddp import first_lossy
from tests.sharding.frozen_beside_ddp import Changing
from tests.sharding.ranks import say
from tests.sharding.stowed_trainer import logged, trainer_in

STEPS, SAVED = 6, 3
SHORT: dict[str, Any] = {
    "max_steps": STEPS,
    "save_steps": SAVED,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
}


def how(folder: Path) -> dict[str, Any]:
    return {"device_budget": "70%", "quick": True, "cache_dir": folder / "stores", "say": lambda _: None}


class Masked(Trainer):
    """Trains in plain PyTorch by the masks of a policy."""

    policy: Changing
    units: Sequence[Unit]

    def training_step(self, model: nn.Module, *given: Any, **named: Any) -> torch.Tensor:
        active = self.policy.mask(self.units, self.state.global_step)
        parameters = dict(getattr(model, "module", model).named_parameters())
        for unit in self.units:
            for name in unit.parameters:
                parameters[name].requires_grad_(unit.name in active)
        if active:
            return super().training_step(model, *given, **named)
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(given[0])).detach()


def beside(folder: Path) -> dict[str, Trainer]:
    """Masks from none to all of the units, and plain PyTorch with the same."""
    policy = Changing()
    stowed = stow(trainer_in(folder / "stowed", **SHORT), freeze=Freeze(policy=policy), **how(folder))
    stowed.train()
    plain = trainer_in(folder / "plain", ddp_find_unused_parameters=True, **SHORT)
    plain.__class__ = Masked
    plain.policy, plain.units = policy, units_in(stowed.stowage.step)
    plain.train()
    return {"stowed": stowed, "plain": plain}


def resumed(folder: Path, **choice: Any) -> dict[str, Trainer]:
    """A run to the end, and one of another Trainer from the middle of it."""
    whole = stow(trainer_in(folder / "whole", **SHORT), **choice, **how(folder))
    whole.train()
    dist.barrier()
    again = stow(trainer_in(folder / "again", **SHORT), **choice, **how(folder))
    again.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{SAVED}"))
    return {"whole": whole, "again": again}


def main(mode: str, folder: Path) -> None:
    if mode == "beside":
        trainers = beside(folder)
    elif mode == "freezes":
        with patch("stowage.stages.solve.frozen.HALVINGS", 1):
            trainers = resumed(folder, freeze=Freeze(rate=0.75))
    else:
        with (
            patch.object(saved_module, "SMALLEST", 64),
            patch("stowage.flows.planning.step.solve_variants", first_lossy),  # be it the fastest or not
        ):
            trainers = resumed(folder, lossy=Lossy("int8_tensor", 0.1))
    plans = [trainer.stowage.plan for trainer in trainers.values() if hasattr(trainer, "stowage")]
    say(
        {
            "losses": {name: logged(trainer, "loss") for name, trainer in trainers.items()},
            "within": all(plan.device_peak_bytes <= plan.device_budget_bytes for plan in plans),
            "units": [plans[0].active_units, plans[0].units],
            "plan": plans[0].plan_hash,
            "codes": [kept.partition(":")[0] for kept in plans[0].lossy],
            "exact": all(plan.exact for plan in plans),
        }
    )
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
