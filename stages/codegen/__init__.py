"""Write the plan as readable Python."""

from __future__ import annotations

import hashlib

from stowage.stages.codegen.emit import emit_step
from stowage.stages.ir.plan import Manifest

__all__ = ["Manifest", "emit_step", "manifest_of"]


def manifest_of(source: str, plan_hash: str, configuration_hash: str) -> Manifest:
    """The manifest of a generated text."""
    return Manifest(plan_hash, configuration_hash, hashlib.sha256(source.encode()).hexdigest())
