"""What tests of several stages share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fit_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store of costs, options and plans for all calls of `fit` in a session: the device is measured once."""
    return tmp_path_factory.mktemp("fit_home")
