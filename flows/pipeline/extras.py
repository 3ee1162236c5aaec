"""Requires packages that only some commands need, and that an installation for `fit` alone does not have."""

from __future__ import annotations

from importlib.util import find_spec

from stowage.stages.ir.errors import StowageError

PIPELINE = "pipeline"
"""Name of the extra with Prefect and DVC."""


class MissingExtraError(StowageError, ImportError):
    """Says that a package is missing which an extra of Stowage installs."""


def require_extra(module: str, extra: str) -> None:
    """Refuse to continue unless `module` can be imported.

    Raises:
        MissingExtraError: it cannot.
    """
    if find_spec(module) is None:
        raise MissingExtraError(f"This needs {module}, which is not installed: run `pip install 'stowage[{extra}]'`.")
