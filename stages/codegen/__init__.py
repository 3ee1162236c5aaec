"""Writes the plan as readable Python.

- `emit`: the text of `step.py`.
- `header`: the lines above a step.
- `actions`: the lines of each action of a plan.
- `calls`: the lines of the calls of a node.
- `guarding`: the conditions of a plan that freezes.
- `names`: names of tensors in a step.
- `manifest`: the manifest of a text.
"""

from stowage.stages.codegen.emit import emit_step
from stowage.stages.codegen.manifest import manifest_of
from stowage.stages.ir.plan import Manifest

__all__ = ["Manifest", "emit_step", "manifest_of"]
