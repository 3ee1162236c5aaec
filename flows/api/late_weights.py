"""Loads weights of a model built on the meta device, once a plan says where each belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.plan import Slot
from stowage.stages.runtime.files.weights import WeightFiles, keys_of, load_buffers, stand_ins
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.structure import tensors_of


class LateWeights:
    """Parameters that are still in files.

    Attributes:
        layouts: name -> a tensor on the meta device with the layout the parameter will have; empty once they are
            loaded.
    """

    def __init__(self, model: nn.Module, batch: Any, weights: str | Path | None) -> None:
        """Replace tensors on the meta device by stand-ins on the batch's device.

        Raises:
            ParameterError: there are parameters on the meta device and no `weights`, or a tensor is missing there.
        """
        self._model = model
        self.layouts: dict[str, torch.Tensor] = {}
        without = [name for name, p in model.named_parameters() if p.is_meta]
        if not without:
            if weights is not None:
                raise ParameterError(
                    "weights is for models built under torch.device('meta'): this one has its weights."
                )
            return
        if weights is None:
            raise ParameterError(
                f"Parameter '{without[0]}' is on the meta device: pass weights, a safetensors file or a folder of them."
            )
        self._files = WeightFiles(weights)
        tensors = tensors_of(batch)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        meta = dict(model.named_parameters())
        self._keys = keys_of(model, {n: meta[n] for n in without}, self._files)
        load_buffers(model, self._files, self._device)
        self.layouts = stand_ins(model, self._device)

    def load(self, offloading: Offloading | None, slots: list[Slot]) -> None:
        """Read every tensor, one at a time, into the tier where the first plan keeps it."""
        if not self.layouts:
            return
        if offloading is not None:
            offloading.populate(self._tensors(), slots)
        else:
            parameters = dict(self._model.named_parameters())
            for name, tensor in self._tensors():
                parameters[name].data = tensor
        self.layouts = {}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, layout in self.layouts.items():
            key = self._keys[name]
            tensor = self._files.read(key)
            if tensor.shape != layout.shape:
                raise ParameterError(
                    f"weights: '{key}' has shape {tuple(tensor.shape)}, parameter '{name}' {tuple(layout.shape)}."
                )
            yield name, tensor.to(device=self._device, dtype=layout.dtype)
