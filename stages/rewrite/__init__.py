"""Rewrites of a trace, which compute the same step with other calls; planning tries each, and mixes them by blocks.

- `sharding`: lets every rank hold one shard of each parameter.
- `buckets`: exchanges small tensors of one block together.
- `lossy`: keeps values for backward in fewer bits, where the user has asked for it.
- `masks`: stores dropout masks as bytes.
- `rewrites`: the table of rewrites.
- `variants`: makes the traces of variants from their names.
- `identity`: finds the calls and storages of one rewrite of a trace in another.
- `splice`: puts nodes and blocks of several rewrites together.
- `mixed`: makes steps in which some blocks are rewritten.
"""

from stowage.stages.rewrite.masks import pack_masks
from stowage.stages.rewrite.mixed import mixed, needed_variant, stored_variant, variant_named
from stowage.stages.rewrite.rewrites import REWRITES, Rewrite
from stowage.stages.rewrite.splice import Way, exchangeable
from stowage.stages.rewrite.variants import (
    is_asked,
    is_exact,
    is_for_freezing,
    kinds_of,
    load_variant,
    rewritten,
    variants_of,
)

__all__ = [
    "REWRITES",
    "Rewrite",
    "Way",
    "exchangeable",
    "is_asked",
    "is_exact",
    "is_for_freezing",
    "kinds_of",
    "load_variant",
    "mixed",
    "needed_variant",
    "pack_masks",
    "rewritten",
    "stored_variant",
    "variant_named",
    "variants_of",
]
