"""What is known of the outputs of calls, in this process."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from stowage.stages.ir.errors import StowageError
from stowage.stages.kernels.forms import Output

Outputs = tuple[Output | None, ...]
"""One for each output; None where it is no tensor."""


class FakeKernelError(StowageError):
    """Real kernels return other strides, storages or shapes than the trace says.

    Attributes:
        outputs: what they return, by signature.
    """

    def __init__(self, outputs: Mapping[str, Outputs], example: str) -> None:
        super().__init__(
            f"{len(outputs)} operations return other layouts than PyTorch's fake kernels say ({example}): what they "
            "return is known now, so trace the step again (in a pipeline `dvc repro --force trace`)."
        )
        self.outputs = dict(outputs)


@dataclass
class KnownOutputs:
    """Outputs of calls, as real kernels return them.

    Attributes:
        tried: of calls that were run on made-up arguments while tracing, by whatever tells calls apart; None where the
            fake kernel is right, or nothing is known.
        small: of smaller forms of calls, what real and fake kernels return; None where one of them takes none such.
        measured: of calls whose fake kernels were found wrong while profiling, by signature.
    """

    tried: dict[Hashable, Outputs | None] = field(default_factory=dict)
    small: dict[Hashable, tuple[Outputs, Outputs] | None] = field(default_factory=dict)
    measured: dict[str, Outputs] = field(default_factory=dict)

    def learn(self, found: Mapping[str, Outputs]) -> bool:
        """Remember what profiling found; whether any of it is new."""
        new = {signature: outputs for signature, outputs in found.items() if self.measured.get(signature) != outputs}
        self.measured.update(new)
        return bool(new)


@functools.cache
def known_outputs() -> KnownOutputs:
    """What this process knows: kernels do not change while it runs."""
    return KnownOutputs()
