"""What is inside an object of any class: its tensors and its plain data, found in one order and put together again.

kinds.py   what is looked into, and what its parts are
parts.py   every tensor and every plain value of a batch, with how Python reaches it
values.py  a plain value in words
copies.py  the same batch with other tensors
tree.py    parameters and buffers of a model, found once
generators.py   global generators, left as they were
"""

from stowage.stages.structure.copies import copied, with_tensors
from stowage.stages.structure.parts import Part, leaves, parts, tensors_of

__all__ = ["Part", "copied", "leaves", "parts", "tensors_of", "with_tensors"]
