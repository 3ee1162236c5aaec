"""Exact rewrites of a trace: other calls, the same numbers."""

from stowage.stages.rewrite.masks import pack_masks
from stowage.stages.rewrite.variants import VARIANTS, load_variant, variants_of

__all__ = ["VARIANTS", "load_variant", "pack_masks", "variants_of"]
