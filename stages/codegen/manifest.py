"""Makes the manifest of a generated text."""

from __future__ import annotations

import hashlib

from stowage.stages.ir.plan import Manifest


def manifest_of(source: str, plan_hash: str, configuration_hash: str) -> Manifest:
    """Return the manifest of a generated text."""
    return Manifest(plan_hash, configuration_hash, hashlib.sha256(source.encode()).hexdigest())
