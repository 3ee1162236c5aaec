"""Says when plain PyTorch runs beside a plan: the argument `check` of `fit`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from stowage.stages.ir.errors import ParameterError

Check = Literal["powers", "always", "never", "gradients"]


def check_of(value: Any) -> Check:
    """Return `value` if it is a valid argument `check`.

    Raises:
        ParameterError: it is not.
    """
    if value not in get_args(Check):
        raise ParameterError(
            f"check is {value!r}: give 'powers' (calls 1, 2, 4, 8, …), 'always', 'never' or 'gradients'."
        )
    found: Check = value
    return found
