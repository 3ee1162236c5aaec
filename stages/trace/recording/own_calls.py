"""Records what the user's code does with tensors: the line, the function and its arguments.

Modules of PyTorch count as what the code makes of them: a normalisation that it has switched to evaluation gets other
arguments. Those that ask by themselves whether something requires gradients count by the line that calls them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_MODES = f"{Path(__file__).parent}{os.sep}"
_STOWAGE = tuple(f"{Path(__file__).parents[2].with_name(part)}{os.sep}" for part in ("flows", "stages"))
"""Not all that is beside these folders: in a clone that is installed as it lies, the user's code may be."""

_PLAIN = (int, float, complex, str, slice, type(None), type(...), torch.dtype, torch.device, torch.layout)
"""Types of arguments that are written as they are; of others the type alone, since their text may be an address."""


_ASKING = tuple(f"{_TORCH}nn{os.sep}modules{os.sep}{name}.py" for name in ("activation", "transformer"))
"""Code of PyTorch that takes other kernels, by functions of its own, where nothing requires gradients."""


class OwnCall(NamedTuple):
    """A call of PyTorch for the user's code.

    Attributes:
        line: `file:line` of the code.
        content: the function with its arguments, tensors as numbers in the order in which they are first seen; "" for
            calls by code that asks what requires gradients.
    """

    line: str
    content: str


class OwnCalls(TorchFunctionMode):
    """Lists such calls while it is on; those without content for one line in a row count once.

    Attributes:
        calls: the calls, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OwnCall] = []
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, such as requires_grad: what is made of the answer counts
            return func(*args, **kwargs)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_MODES):  # another mode passes the call on
            frame = frame.f_back
        line, asking = _own(frame)
        content = "" if asking or not line else f"{name}{self._content((args, kwargs))}"
        found = func(*args, **kwargs)
        if line:
            if content:
                self._content(found)
            call = OwnCall(line, content)
            if content or not self.calls or call != self.calls[-1]:
                self.calls.append(call)
        return found

    def _content(self, given: Any) -> str:
        return str(pytree.tree_map(self._word, given))

    def _word(self, item: Any) -> str:
        if isinstance(item, torch.Tensor):
            number, _ = self._seen.setdefault(id(item), (len(self._seen), item))
            return f"%{number}"
        return repr(item) if isinstance(item, _PLAIN) else type(item).__name__


def _own(frame: FrameType | None) -> tuple[str, bool]:
    """Return the line of the user's code for which PyTorch is called, and whether code is between that asks.

    The line is "" where it is for tracing.
    """
    asking = False
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        asking = asking or frame.f_code.co_filename in _ASKING
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_STOWAGE):
        return "", asking
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", asking
