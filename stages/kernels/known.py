"""Keeps what this process knows about the outputs of calls."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from stowage.stages.ir.errors import StowageError
from stowage.stages.kernels.forms import Output

Outputs = tuple[Output | None, ...]
"""One entry for each output of a call; None where the output is no tensor."""


class FakeKernelError(StowageError):
    """Raised when real kernels return other strides, storages or shapes than the trace says.

    Attributes:
        outputs: signature of a call -> what the real kernel returns.
    """

    def __init__(self, outputs: Mapping[str, Outputs], example: str) -> None:
        super().__init__(
            f"{len(outputs)} operations return other layouts than PyTorch's fake kernels say ({example}): what they "
            "return is known now, so trace the step again (in a pipeline `dvc repro --force trace`)."
        )
        self.outputs = dict(outputs)


@dataclass
class KnownOutputs:
    """The outputs of calls, as real kernels return them.

    Attributes:
        tried: key of a call that was run on made-up arguments while tracing -> its outputs; None where the fake kernel
            is right, or nothing is known.
        small: key of a call with smaller arguments -> what the real and the fake kernel return; None where one of them
            accepts no such arguments.
        measured: signature of a call whose fake kernel was found wrong while profiling -> its outputs.
    """

    tried: dict[Hashable, Outputs | None] = field(default_factory=dict)
    small: dict[Hashable, tuple[Outputs, Outputs] | None] = field(default_factory=dict)
    measured: dict[str, Outputs] = field(default_factory=dict)

    def learn(self, found: Mapping[str, Outputs]) -> bool:
        """Remember what profiling found, and say whether any of it is new."""
        new = {signature: outputs for signature, outputs in found.items() if self.measured.get(signature) != outputs}
        self.measured.update(new)
        return bool(new)


@functools.cache
def known_outputs() -> KnownOutputs:
    """Return what this process knows; one object, since kernels do not change while the process runs."""
    return KnownOutputs()
