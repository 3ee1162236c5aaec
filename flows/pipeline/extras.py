"""Packages that only some commands need, which an installation for `fit` alone does not have."""

from __future__ import annotations

from importlib.util import find_spec

from stowage.stages.ir.errors import StowageError

PIPELINE = "pipeline"
"""The extra with Prefect and DVC."""


class MissingExtraError(StowageError, ImportError):
    """A package that an extra of Stowage installs is not there."""


def require_extra(module: str, extra: str) -> None:
    """Raise `MissingExtraError` unless `module` can be imported."""
    if find_spec(module) is None:
        raise MissingExtraError(f"This needs {module}, which is not installed: run `pip install 'stowage[{extra}]'`.")
