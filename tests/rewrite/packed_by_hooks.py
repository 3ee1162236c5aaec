"""Plain PyTorch that keeps some values in codes, by `saved_tensors_hooks`: the reference for lossy rewrites.

It shares no code with the rewrites: codecs are written anew, and what is packed is told by the operator that makes it
and how many calls of that operator came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from stowage.stages.ir.trace import TraceTables
from stowage.stages.ir.variant import VariantName
from stowage.stages.rewrite.lossy import CODECS, compressed_sites

Key = tuple[str, int]
"""An operator, and how many calls of it came before."""


def _cast(dtype: torch.dtype, limit: float = 0.0) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x.clamp(-limit, limit) if limit else x).to(dtype).to(x.dtype)


def _fixed(step: float, low: int, high: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x * (1 / step)).round().clamp(low, high) * step


def _scaled(levels: int, group: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def lossy(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 64) if group == "group" else x
        over = tuple(range(x.dim())) if group == "tensor" else (-1,)
        least = 6e-8 if x.dtype == torch.float16 else 1e-30
        scale = (rows.abs().amax(over, keepdim=True) * (1 / levels)).clamp(min=least)
        found: torch.Tensor = ((rows / scale).round().clamp(-levels, levels) * scale).reshape(x.shape)
        return found

    return lossy


def _four_points(bound: float, near: float, far: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.where(x > 0, 1.0, -1.0) * ((x.abs() > bound).float() * (far - near) + near)


def _largest(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    away = x - mean
    sizes = (away * (away.square().mean(-1, keepdim=True) + 1e-12).rsqrt()).abs().flatten()
    where = sizes.topk(max(1, int(0.1 * x.numel()))).indices
    found = mean.repeat(*[1] * (x.dim() - 1), x.shape[-1])
    found.view(-1)[where] = x.flatten()[where]
    return found


REFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": _cast(torch.bfloat16),
    "fp8_e4m3": _cast(torch.float8_e4m3fn, 448.0),
    "fp8_e5m2": _cast(torch.float8_e5m2, 57344.0),
    "fixed8": _fixed(1 / 16, -128, 127),
    "fixed8_unit": _fixed(1 / 256, 0, 255),
    "fixed4": _fixed(1 / 2, -8, 7),
    **{
        f"int{b}{'' if g == 'row' else f'_{g}'}": _scaled(n, g)
        for b, n in ((8, 127), (4, 7))
        for g in ("row", "tensor", "group")
    },
    "relu1bit": lambda x: (~(x <= 0)).float() - 0.5,
    "gelu2bit": _four_points(0.46902644222919954, 0.23021011154380255, 2.8914878456084363),
    "silu2bit": _four_points(0.7892766768033946, 0.38462932688801993, 4.991476053914828),
    "top10": _largest,
}
"""What is read back of a value, for each kind."""


@dataclass(frozen=True)
class Chosen:
    """Which outputs of which calls are packed, in which kind, and which calls are made again of them."""

    packed: dict[tuple[Key, int], str]
    again: frozenset[Key]

    @staticmethod
    def of(trace: TraceTables, variant: str) -> Chosen:
        """Return what a variant packs."""
        keys: list[Key] = []
        before: Counter[str] = Counter()
        for call in trace.calls:
            keys.append((call.target, before[call.target]))
            before[call.target] += 1
        packed: dict[tuple[Key, int], str] = {}
        again: set[Key] = set()
        for kind, sites in VariantName.of(variant).parts:
            if kind not in CODECS:
                continue
            found = compressed_sites(trace, CODECS[kind])
            for saved in found if sites is None else [found[site] for site in sites]:
                for part in saved.parts:
                    packed[keys[part.maker], trace.values[part.base].output] = kind
                again.update(keys[c] for c in saved.again)
        return Chosen(packed, frozenset(again))


@dataclass
class _Made:
    key: Key
    function: Any
    args: Any
    kwargs: Any
    output: int
    base: torch.Tensor


class PackedByHooks(TorchDispatchMode):
    """Inside, autograd keeps chosen values in codes."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__()
        self._chosen = chosen
        self._made: dict[int, _Made] = {}
        self._before: Counter[str] = Counter()
        self._read_back: dict[int, torch.Tensor] = {}
        self.used: set[tuple[Key, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        target = str(func)
        key = target, self._before[target]
        self._before[target] += 1
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()._cdata
                self._made.setdefault(storage, _Made(key, func, args, kwargs, output, tensor.detach()))
        return result

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the hooks; they are used inside of the mode."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._now(tensor)

    def _now(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what backward reads instead of a tensor."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._read_back:
            made = self._made.get(storage)
            if made is None:
                return tensor
            kind = self._chosen.packed.get((made.key, made.output))
            if kind is not None:
                self.used.add((made.key, made.output))
                self._read_back[storage] = REFERENCE[kind](made.base)
            elif made.key in self._chosen.again:
                args, kwargs = tree_map_only(torch.Tensor, self._now, (made.args, made.kwargs))
                found = made.function(*args, **kwargs)
                self._read_back[storage] = found[made.output] if isinstance(found, (tuple, list)) else found
            else:
                return tensor
        base = self._read_back[storage]
        assert base.stride() == self._made[storage].base.stride()
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class hooked(ExitStack):  # noqa: N801 - a context manager
    """Run a forward and its backward inside, with chosen values kept in codes."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__()
        self._mode = PackedByHooks(chosen)

    def __enter__(self) -> PackedByHooks:  # type: ignore[override]
        self.enter_context(self._mode)
        self.enter_context(self._mode.hooks())
        return self._mode
