"""Write the plan as readable Python."""

from __future__ import annotations

import hashlib

from stowage.stages.ir.plan import Manifest


def manifest_of(source: str, plan_hash: str, configuration_hash: str) -> Manifest:
    """The manifest of a generated text."""
    return Manifest(plan_hash, configuration_hash, hashlib.sha256(source.encode()).hexdigest())
