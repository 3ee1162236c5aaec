"""What `make test` runs of tests that come in large numbers: a few cases of each; `make test-long` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = 100
"""Examples of a Hypothesis profile with which `examples` gives all that a test asks for."""
FEWEST = 5
"""Examples that no profile goes below, where a test asks for as many."""


def some(values: Iterable[Any], keep: Collection[Any] | None = None, exactness: Collection[Any] = ()) -> list[Any]:
    """Arguments of `pytest.mark.parametrize`: all values, those that are not in `keep` marked `long`.

    A tuple is several arguments. Those in `exactness` are tried on all versions too.
    """
    found = list(values)
    missing = [value for value in (*(keep or ()), *exactness) if value not in found]
    assert not missing, f"there is no {missing}"

    def marks(value: Any) -> list[pytest.MarkDecorator]:
        long = [pytest.mark.long] if keep is not None and value not in keep else []
        return [*long, *([pytest.mark.exactness] if value in exactness else [])]

    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks(v)) for v in found]


def examples(most: int) -> int:
    """How many examples Hypothesis tries in a test that is thorough with `most`: fewer in the profile `fast`."""
    return min(most, max(FEWEST, most * settings().max_examples // THOROUGH))
