"""Finds the first batches that a Trainer will evaluate on, before it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stowage.stages.workload.randomness import seeded


def first_evaluations(trainer: Any) -> Iterator[Any]:
    """Yield the first batch of each data set that training will be interrupted to evaluate on, on the device.

    Nothing of the Trainer notices: generators are as before, and a data set that can be read only once is left alone.
    """
    if str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) == "no":
        return
    data = trainer.eval_dataset
    names: list[str | None] = list(data) if isinstance(data, dict) else [None]
    for name in names:
        chosen = data[name] if isinstance(data, dict) else data
        if chosen is None or isinstance(chosen, IterableDataset) or trainer.args.dataloader_num_workers:
            continue
        batch = _first(trainer, name)
        if batch is not None:
            yield batch


def _first(trainer: Any, name: str | None) -> Any:
    """Return the first batch, or None where there is none: evaluation itself explains better what is wrong."""
    with contextlib.suppress(Exception), seeded(0):
        loader = trainer.get_eval_dataloader(name) if name is not None else trainer.get_eval_dataloader()
        # Accelerate's own iteration would register this loader as the one in use.
        return trainer._prepare_inputs(next(iter(DataLoader.__iter__(loader))))
    return None
