"""Finds the first batches that a Trainer will evaluate on, before it does, and gives batches the form of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from stowage.stages.ir.lossy import LOOKED_AT
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


class AsStepped:
    """Batches of the user's, each as the Trainer's step takes it: on the device, and with what comes beside it.

    What comes beside it is that of the step's own batch, so that the mean over tokens has the same weight in all.
    """

    def __init__(self, trainer: Any, given: Iterable[Any], beside: Callable[[], Mapping[str, Any]]) -> None:
        """Keep what they are made of; `beside` returns the step's own batch."""
        self._trainer, self._given, self._beside = trainer, given, beside

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield them; nothing of the Trainer notices."""
        with seeded(0):
            given: Any = self._given
            if isinstance(given, DataLoader):  # Accelerate's own iteration would register this loader as the one in use
                given = DataLoader.__iter__(given)
            found = list(islice(given, LOOKED_AT))
        for inputs in found:
            yield {**self._beside(), "inputs": self._trainer._prepare_inputs(inputs)}
