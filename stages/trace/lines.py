"""Finds where a module is written."""

from __future__ import annotations

import inspect

from torch import nn


def source_line(module: nn.Module) -> str:
    """Return `file:line` of the module's class, or its class name where the source cannot be found."""
    try:
        file, line = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))[1]
        return f"{file}:{line}"
    except (OSError, TypeError):
        return type(module).__qualname__
