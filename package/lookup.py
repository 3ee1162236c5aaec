"""Finds public names of the package when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def find(name: str) -> Any:
    """Return what `stowage.flows` has under this name; torch is imported only then.

    Raises:
        AttributeError: it has nothing.
    """
    if name.startswith("_"):
        raise AttributeError(f"module 'stowage' has no attribute {name!r}")
    return getattr(import_module("stowage.flows"), name)
