"""Planning without what torch tells its own developers: log lines and warnings raised inside it."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

_INSIDE = r"(torch|stowage\.stages\.(trace|profile|device))(\.|$)"
"""Modules whose warnings are not the user's: torch's, and ours, where its kernels warn."""
_LOGS_WANTED = "TORCH_LOGS"
"""Environment variable with which people ask for torch's log."""


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep log lines and warnings of torch away; warnings of the user's code, and logs asked for, are as ever."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_INSIDE)
        if os.environ.get(_LOGS_WANTED):
            yield
            return
        with _without_handlers("torch"):
            yield


@contextlib.contextmanager
def _without_handlers(package: str) -> Iterator[None]:
    """Records of `package` and of what is below it go nowhere; loggers that come meanwhile included."""
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
