"""Sizes as people write them (`900MiB`, `1.5GiB`, `12GB`, an integer of bytes) and budgets (`50%`)."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from stowage.stages.ir.errors import ParameterError

_BYTE_SIZE = TypeAdapter(ByteSize)
_EXAMPLES = "'900MiB', '1.5GiB', '12GB' or a whole number of bytes"


def parse_bytes(size: str | int, key: str = "size") -> int:
    """Bytes of a size.

    Args:
        size: `900MiB` (1024-based), `12GB` (1000-based), or a whole number of bytes.
        key: what to call it in the message.

    Raises:
        ParameterError: it is not a size, or not positive.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise ParameterError(f"{key} is {size!r}, which is not a size: write {_EXAMPLES}.")
    try:
        nbytes = int(_BYTE_SIZE.validate_python(size))
    except ValidationError as error:
        raise ParameterError(f"{key} is {size!r}, which is not a size: write {_EXAMPLES}.") from error
    if nbytes <= 0:
        raise ParameterError(f"{key} is {size!r}, which is not above zero: write {_EXAMPLES}.")
    return nbytes


def parse_percentage(text: str, key: str = "budget") -> float:
    """The fraction that `50%` stands for.

    Raises:
        ParameterError: it is not a percentage above 0%.
    """
    try:
        fraction = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        fraction = -1.0
    if not (text.strip().endswith("%") and 0 < fraction < float("inf")):
        raise ParameterError(f"{key} is {text!r}, which is not a percentage above zero: write '50%'.")
    return fraction


def resolve_budget(budget: str | int, whole_bytes: int, key: str = "solve.device_budget") -> int:
    """Bytes of a budget; a percentage is of `whole_bytes`, the predicted total peak of plain PyTorch.

    Raises:
        ParameterError: it is neither a size nor a percentage.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return int(parse_percentage(budget, key) * whole_bytes)
    return parse_bytes(budget, key)
