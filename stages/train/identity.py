"""Identifies the run that a checkpoint belongs to by the contents of weights, data, user's code and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from stowage.stages.inputs.origin import content_hashes
from stowage.stages.ir.freezable import FreezeChoice
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.settings import Settings
from stowage.stages.train.setup import Setup

_PIECE = 64 << 20


def run_name(
    root: Path,
    settings: Settings,
    summary: PlanSummary,
    setup: Setup,
    code: Iterable[str],
    freezing: FreezeChoice | None = None,
) -> str:
    """Return the name of a run: equal runs get equal names, however many steps they take.

    Args:
        root: the project.
        settings: the run's parameters.
        summary: the summary of its plan.
        setup: a fresh one; the contents of its weights, its batch and its text count.
        code: files of the user's that the run executes.
        freezing: what the run freezes.
    """
    train = settings.train
    digest = hashlib.sha256()
    stated = {
        "plan": summary.plan_hash,
        "configuration": summary.configuration_hash,
        "trace": settings.trace.model_dump(),
        "seed": train.seed,
        "schedule": train.schedule.model_dump() if train.schedule else None,
        "batches": train.data.callable,
        "code": content_hashes(root, code),
        "torch": torch.__version__,
    }
    if freezing is not None and freezing.policy:
        stated["freezing"] = asdict(freezing)
    digest.update(json.dumps(stated, sort_keys=True).encode())
    for name, tensor in [*setup.model.named_parameters(), *setup.model.named_buffers()]:
        digest.update(f"{name}:".encode(errors="surrogatepass"))
        _add(digest, tensor)
    sample = setup.sample if setup.made is None else setup.made(0)
    data = [setup.stream] if setup.stream is not None else pytree.tree_leaves(sample)
    for leaf in data:
        if isinstance(leaf, torch.Tensor):
            _add(digest, leaf)
        else:
            digest.update(repr(leaf).encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _add(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().reshape(-1)
    for piece in torch.split(flat, max(1, _PIECE // max(1, tensor.element_size()))):
        content: Any = piece.cpu().contiguous().view(torch.uint8).numpy()
        digest.update(content)


def checkpoint_of(folder: Path, name: str, steps: int, iteration: int | None) -> Path:
    """Return the path of the checkpoint of a run of so many steps.

    A checkpoint that a longer run has left at a later iteration is of no use to it, and stays for that run.

    Args:
        folder: the folder of checkpoints.
        name: the name of the run.
        steps: the steps that it takes.
        iteration: the iteration of the checkpoint under its name; None where there is none.
    """
    if iteration is not None and iteration > steps:
        return folder / f"{name}-{steps}.safetensors"
    return folder / f"{name}.safetensors"
