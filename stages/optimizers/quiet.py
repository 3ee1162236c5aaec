"""Provides a block in which copies of an optimizer step without side effects."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as module

SEED = 20_240_607


@contextmanager
def quiet() -> Iterator[None]:
    """Run the block with seeded generators, gradients on, and no warnings or hooks of all optimizers.

    Generators and hooks are restored afterwards.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    tables: list[Any] = [module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks]
    hooks = [dict(table) for table in tables]
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            for table in tables:
                table.clear()
            torch.manual_seed(SEED)
            np.random.seed(SEED)
            random.seed(SEED)
            yield
        finally:
            for table, content in zip(tables, hooks):
                table.update(content)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def drawn() -> tuple[Any, ...]:
    """Return the state of the global generators, which changes when someone draws from them."""
    numpy_state: Any = np.random.get_state(legacy=True)
    found: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    found += [numpy_state[1].tobytes(), *numpy_state[2:]]
    if torch.cuda.is_available():
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return tuple(found)


def global_hooks() -> bool:
    """Say whether there are hooks that run at every optimizer's step."""
    return bool(module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks)
