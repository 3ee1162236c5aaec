"""Tells what people write from Python and installed packages."""

from __future__ import annotations

import os
import sysconfig

STANDARD = tuple(
    {
        change(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib")
        for change in (str, os.path.realpath)
    }
)
"""The folders of Python's own modules."""

_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_packaged(file: str) -> bool:
    """Say whether a file is part of an installed package."""
    return any(part in file for part in _PACKAGES)


def is_installed(file: str) -> bool:
    """Say whether a file is part of Python or an installed package, which people do not edit while they train."""
    return file.startswith("<frozen") or is_packaged(file) or file.startswith(STANDARD)
