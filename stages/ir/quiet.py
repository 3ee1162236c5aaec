"""Silences what torch tells its own developers: log lines and warnings raised inside it."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

_INSIDE = r"(torch|stowage\.stages\.(trace|profile|device))(\.|$)"
"""Modules whose warnings do not concern the user: torch's, and Stowage's that call its kernels."""
_LOGS_WANTED = "TORCH_LOGS"
"""Environment variable with which people ask for torch's log."""


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress log lines and warnings of torch; the user's code still warns, and logs asked for still appear."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_INSIDE)
        if os.environ.get(_LOGS_WANTED):
            yield
            return
        with _without_handlers("torch"):
            yield


@contextlib.contextmanager
def _without_handlers(package: str) -> Iterator[None]:
    """Discard records of `package` and of its subpackages, also from loggers made meanwhile."""
    top = logging.getLogger(package)
    known = logging.root.manager.loggerDict.items()
    below = [logger for name, logger in known if name.startswith(f"{package}.") and isinstance(logger, logging.Logger)]
    before = [(logger, logger.handlers, logger.propagate) for logger in (top, *below)]
    for logger in below:
        logger.handlers, logger.propagate = [], True
    top.handlers, top.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
