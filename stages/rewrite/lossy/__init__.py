"""Rewrites that keep values for backward as codes of fewer bits: each changes gradients, and none changes the loss.

- `again`: lists the operators that are cheap enough to be computed again.
- `saved`: finds the values that forward saves for backward and that may be packed.
- `emitter`: makes the calls, values and storages that a rewrite adds to a trace.
- `codecs`: packs a value and unpacks it again, one codec for each kind of codes.
- `bounded`: tells which values are within [0, 1].
- `bits`: keeps one or two bits of what an activation function's backward reads.
- `largest`: keeps the largest tenth of what a frozen layer normalisation reads.
- `compress`: packs values at some sites of a trace, and lets backward read what is unpacked.
- `classes`: names classes of tensors, which are chosen together.
- `choose`: chooses classes and kinds within a limit on the error of the gradient.
"""

from stowage.stages.rewrite.lossy.choose import candidates, choices
from stowage.stages.rewrite.lossy.classes import Classes, described, effects
from stowage.stages.rewrite.lossy.codecs import CODECS, Codec, allowed
from stowage.stages.rewrite.lossy.compress import compress, compressed_sites

__all__ = [
    "CODECS",
    "Classes",
    "Codec",
    "allowed",
    "candidates",
    "choices",
    "compress",
    "compressed_sites",
    "described",
    "effects",
]
