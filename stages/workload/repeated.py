"""Finds the blocks of a model that are built alike, and runs it with fewer of them: a profile of few serves for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LONGEST_PERIOD = 8
"""Most blocks after which a pattern of blocks repeats, such as one of local and global attention."""

LONGEST_PREFIX = 3
"""Most blocks before the pattern begins, such as the first block of T5, which alone has relative positions."""


SMALL = 8
"""A block with less than this part of the largest block's bytes is no group: its weights go with the model's own."""


@dataclass(frozen=True)
class Repeated:
    """A list of blocks that repeats a pattern.

    Attributes:
        path: of the list in the model.
        length: number of blocks.
        prefix: blocks before the pattern begins.
        period: length of the pattern.
    """

    path: str
    length: int
    prefix: int
    period: int

    @property
    def least(self) -> int:
        """Return the fewest blocks that have a first, a middle and a last pattern, and end as the whole list does."""
        least = self.prefix + 2 * self.period + 1
        return least + (self.length - least) % self.period

    def source(self, index: int, kept: int) -> int:
        """Return the block among the first `kept` ones that stands for block `index` of the whole list."""
        tail = kept - self.prefix - self.period
        if index < self.prefix + self.period:
            return index
        if index >= self.length - tail + self.period:
            return kept - (self.length - index)
        return self.prefix + self.period + (index - self.prefix) % self.period


def containers(model: nn.Module) -> dict[str, nn.Module]:
    """Return lists and sequences of modules with parameters, by path; none is inside another."""
    found: dict[str, nn.Module] = {}

    def search(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            blocks = [c for c in child.children() if any(True for _ in c.parameters())]
            if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(blocks) > 1:
                found[inside] = child
            else:
                search(inside, child)

    if isinstance(model, nn.Sequential):
        return {"": model}
    search("", model)
    return found


def repeated_lists(model: nn.Module) -> list[Repeated]:
    """Return the lists of blocks of which a few can stand for all."""
    found = []
    for path, container in containers(model).items():
        if not isinstance(container, nn.ModuleList):
            continue
        forms = _forms(list(container))
        pattern = _pattern(forms)
        if pattern is not None:
            found.append(Repeated(path, len(forms), *pattern))
    return found


def _pattern(forms: Sequence[str]) -> tuple[int, int] | None:
    """Return the prefix and the period of the shortest pattern that leaves blocks out; None where there is none."""
    fits = [
        (prefix, period)
        for period in range(1, LONGEST_PERIOD + 1)
        for prefix in range(LONGEST_PREFIX + 1)
        if all(a == b for a, b in zip(forms[prefix:], forms[prefix + period :]))
        and Repeated("", len(forms), prefix, period).least < len(forms)
    ]
    return min(fits, key=lambda fit: fit[0] + 2 * fit[1]) if fits else None


def _forms(blocks: Sequence[nn.Module]) -> list[str]:
    """Return a text for each block, equal for blocks that are built alike.

    A number that equals the block's position in the list, in all blocks, is the position and makes no difference.
    """
    entries = [_entries(block) for block in blocks]
    positions = {key for key in entries[0] if all(e.get(key) == str(i) for i, e in enumerate(entries))}
    return ["\n".join(f"{k} {v}" for k, v in e.items() if k not in positions) for e in entries]


def _entries(block: nn.Module) -> dict[str, str]:
    """Return classes, layouts of tensors and plain values of a block, by place."""
    found = {}
    for path, module in block.named_modules():
        found[path] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, item in sorted(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                found |= {f"{path} {name}.{key}": _layout(t) for key, t in item.items()}
            elif isinstance(item, (bool, int, float, str, tuple, list, torch.dtype, torch.Size, type(None))):
                found[f"{path} {name}"] = repr(item)
    return found


def _layout(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad}"


@contextmanager
def with_first_blocks(model: nn.Module, kept: Mapping[str, int]) -> Iterator[None]:
    """Run the model with the first blocks of some lists alone; the lists are whole again afterwards.

    Args:
        model: the model.
        kept: path of a list -> number of blocks.
    """
    with ExitStack() as stack:
        for path, count in kept.items():
            stack.enter_context(_cut(model.get_submodule(path), count))
        yield


@contextmanager
def _cut(blocks: nn.Module, count: int) -> Iterator[None]:
    whole = dict(blocks._modules)
    try:
        for name in list(whole)[count:]:
            del blocks._modules[name]
        yield
    finally:
        blocks._modules.clear()
        blocks._modules.update(whole)


def group_candidates(model: nn.Module, called: Mapping[str, Any]) -> tuple[str, ...]:
    """Return paths of modules that may be sharded as groups: blocks of lists, and large modules outside of them.

    Args:
        model: the model.
        called: paths of the modules that are called as such, so that hooks on them run.
    """
    sizes = {
        path: _bytes(child.parameters())
        for container, module in containers(model).items()
        for name, child in module.named_children()
        if (path := f"{container}.{name}" if container else name) in called
    }
    largest = max(sizes.values(), default=0)
    blocks = [path for path, nbytes in sizes.items() if nbytes * SMALL > largest]
    inside = tuple(f"{b}." for b in blocks)
    enough = largest / 2 if blocks else _bytes(model.parameters()) / 8
    outside = [
        path
        for path, module in model.named_modules()
        if path in called
        and path not in blocks
        and path
        and not path.startswith(inside)
        and not any(b.startswith(f"{path}.") for b in blocks)
        and _bytes(module.parameters(recurse=False)) >= enough
    ]
    alone = [p for p in outside if not any(p.startswith(f"{o}.") for o in outside)]
    return (*blocks, *alone)


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def owners_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return for each parameter, by its first name, the paths of all modules that hold it."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = first.setdefault(id(parameter), name)
        found.setdefault(own, []).append(name.rpartition(".")[0])
    return {name: tuple(paths) for name, paths in found.items()}


def collected_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """List modules and the first names of the parameters they hold, as `fully_shard` collects them: children first."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(id(parameter), name)
    found: list[tuple[str, str]] = []
    seen: set[int] = set()

    def collect(path: str, module: nn.Module) -> None:
        seen.add(id(module))
        for name, child in module.named_children():
            if id(child) not in seen:
                collect(f"{path}.{name}" if path else name, child)
        found.extend((path, first[id(p)]) for p in module.parameters(recurse=False))

    collect("", model)
    return tuple(found)


def checkpointed_segments(model: nn.Module) -> dict[str, int]:
    """Return the modules whose activations are checkpointed, by the flag that models of `transformers` have."""
    flagged = [p for p, m in model.named_modules() if m.__dict__.get("gradient_checkpointing") is True and m.training]
    innermost = [p for p in flagged if not any(o != p and o.startswith(f"{p}." if p else "") for o in flagged)]
    return {path: i for i, path in enumerate(innermost)}
