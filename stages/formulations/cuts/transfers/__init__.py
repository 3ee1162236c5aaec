"""Bounds every schedule that may also copy to a lower tier and have the CPU update: one program from all three.

- `below`: what the program knows of the lower tier.
- `model`: the program, with its symbols.
- `equations`: the equations that differ from those without a lower tier.
- `windows`: what passes over the link between two cuts for certain.
- `rates`: the equations of links and of the CPU.
- `solve`: the bound.
"""
