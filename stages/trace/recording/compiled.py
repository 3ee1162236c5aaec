"""Notices functions under `torch.compile` that are entered while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from stowage.stages.ir.errors import TraceError

_WRAPPERS = "torch._dynamo.eval_frame"
"""The module of the wrappers around compiled functions; it is imported where something is compiled."""

_ASKED = "_callback_from_stance"
"""What such a wrapper calls with the compiler that it has; it returns the one that is used, None to compile nothing."""


@contextmanager
def nothing_compiled(place: Callable[[], str]) -> Iterator[None]:
    """Refuse compiled functions inside the block.

    They run as plain Python inside of it, so that the compiler, which expects no error when it is asked, leaves nothing
    half done; in plain PyTorch their kernels are others, and so are their bits.

    Args:
        place: returns the module and line that run now.

    Raises:
        TraceError: a function was entered that would be compiled, unlike one under `torch.compiler.disable`.
    """
    wrappers: Any = sys.modules.get(_WRAPPERS)
    before = getattr(wrappers, _ASKED, None)
    if before is None:
        yield
        return

    entered: list[str] = []

    def asked(compiler: Any) -> Any:
        found = before(compiler)
        function = sys._getframe(1).f_locals.get("fn")
        if found in (None, False) or function is None:
            return found
        entered.append(f"{place()} calls a function under torch.compile ({_name(function)})")
        return None

    setattr(wrappers, _ASKED, asked)
    try:
        yield
    finally:
        setattr(wrappers, _ASKED, before)
    if entered:
        raise TraceError(
            f"{entered[0]}, which computes other bits than a planned step: call the function itself, which the plan "
            "takes the place of."
        )


def _name(function: Any) -> str:
    """Return the name of what was compiled: of a module that was, its class."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return f"{type(owner).__name__}.{function.__name__.replace('_call_impl', 'forward')}"
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name)
