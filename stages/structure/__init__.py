"""Finds the tensors and plain data inside an object of any class, in a fixed order, and copies it with other tensors.

- `kinds.py`: which classes are looked into, and what the parts of an object are.
- `containers.py`: what lists, sets and dictionaries hold, read and restored by none of a subclass's code.
- `memory.py`: what arrays, buffers and generators hold in memory of their own, taken and put back.
- `parts.py`: every tensor and plain value of a batch, each with the Python expression that reaches it.
- `values.py`: a plain value as text.
- `code.py`: what classes, functions and modules can keep things in.
- `mentioned.py`: the names by which code can have looked something up.
- `installed.py`: which code is Python's or of an installed package.
- `copies.py`: the same batch with other tensors.
- `tree.py`: the parameters and buffers of a model by name.
- `generators.py`: a block that restores PyTorch's global random generators.
"""

from stowage.stages.structure.copies import copied, with_tensors
from stowage.stages.structure.parts import Part, leaves, parts, tensors_of

__all__ = ["Part", "copied", "leaves", "parts", "tensors_of", "with_tensors"]
