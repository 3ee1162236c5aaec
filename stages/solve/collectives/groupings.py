"""Puts the parameters of a sharded program into groups, for which choices are made as a whole.

Two ways are usual: what a block reads first, and what people wrap one by one with FSDP2: the layers of a model, with
what lies outside them in a root that stays gathered from the begin of forward to the end of backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from stowage.stages.solve.program.program import StepProgram


@dataclass(frozen=True)
class Grouping:
    """Groups of parameters, in the order in which forward first uses them.

    Attributes:
        members: the parameters of each group.
        root: the group that stays gathered, if there is one.
    """

    members: tuple[frozenset[int], ...]
    root: int | None = None


def groupings(program: StepProgram) -> list[Grouping]:
    """Return the ways to group a program's parameters that differ; none where nothing reads a parameter."""
    blocks, layers = by_block(program), by_layer(program)
    found = [blocks] if blocks.members else []
    return [*found, layers] if len(layers.members) > 1 and set(layers.members) != set(blocks.members) else found


def by_block(program: StepProgram) -> Grouping:
    """Return the parameters that each block reads first."""
    found: dict[int, set[int]] = {}
    for parameter, block in _first_readers(program).items():
        found.setdefault(block, set()).add(parameter)
    return Grouping(tuple(frozenset(parameters) for parameters in found.values()))


def by_layer(program: StepProgram) -> Grouping:
    """Return the root, and the parameters of each layer: of each member of the outermost list of modules.

    A layer's name is that of its parameters up to the first number.
    """
    root, found = set[int](), dict[str, set[int]]()
    for parameter in _first_readers(program):
        layer = _layer(program.storages[parameter].name)
        (root if layer is None else found.setdefault(layer, set())).add(parameter)
    members = [frozenset(parameters) for parameters in (root, *found.values()) if parameters]
    return Grouping(tuple(members), 0 if root else None)


def _layer(parameter: str) -> str | None:
    words = parameter.split(".")
    at = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return None if at is None else ".".join(words[: at + 1])


def _first_readers(program: StepProgram) -> dict[int, int]:
    """Return the block that reads each parameter first, in the order in which that is."""
    found: dict[int, int] = {}
    for node in program.nodes:
        for storage in node.reads:
            if storage not in found and program.storages[storage].role == "parameter":
                found[storage] = node.block
    return found
