"""Write the plan as readable Python."""

from stowage.stages.codegen.emit import emit_step
from stowage.stages.codegen.manifest import manifest_of
from stowage.stages.ir.plan import Manifest

__all__ = ["Manifest", "emit_step", "manifest_of"]
