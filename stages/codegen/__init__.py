"""Write the plan as readable Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from stowage.stages.codegen.emit import emit_step

__all__ = ["Manifest", "emit_step", "manifest_of"]


@dataclass(frozen=True)
class Manifest:
    """What `step.py` belongs to; generated code is run only if its hash matches.

    Attributes:
        plan_hash, configuration_hash: of the plan.
        source_hash: SHA-256 of the text of `step.py`.
    """

    plan_hash: str
    configuration_hash: str
    source_hash: str


def manifest_of(source: str, plan_hash: str, configuration_hash: str) -> Manifest:
    """The manifest of a generated text."""
    return Manifest(plan_hash, configuration_hash, hashlib.sha256(source.encode()).hexdigest())
