"""Reads and replaces parameters and optimizer states one at a time, wherever they are.

While something is read that is in the lower tier, its bytes are in device memory besides; what the plan can reload is
offloaded first, so that the budget is kept (`Offloading.make_room`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from stowage.stages.runtime.files.folder import TensorFolder, is_there
from stowage.stages.runtime.files.source import TensorSource
from stowage.stages.runtime.files.tensor_file import Entry, TensorFile, Visitor, write_tensors
from stowage.stages.runtime.files.torch_file import write_torch
from stowage.stages.runtime.offload.offloading import Offloading

Result = TypeVar("Result")


class Contents:
    """The parameters, buffers and optimizer states of one model and its optimizer.

    Attributes:
        model: the model.
        optimizer: the optimizer that has the states, or None.
        writes: whether this process writes files that are written once.
    """

    writes = True

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, offloading: Offloading | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._offloading = offloading
        self._names = {id(p): n for n, p in model.named_parameters()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Let the optimizer load a `state_dict`; states that are tensors follow by `new_state`."""
        assert self.optimizer is not None
        self.forget_states()
        self.optimizer.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict`, with stand-ins for offloaded states; `lend` gives their content."""
        assert self.optimizer is not None
        with self._offloading.raw_states() if self._offloading is not None else nullcontext():
            found: dict[str, Any] = self.optimizer.state_dict()
        return found

    def settle(self) -> None:
        """Wait for all copies and updates: from then on each state is known by the tensor that stands for it."""
        if self._offloading is not None:
            self._offloading.settle_all()

    def lend(self, tensor: torch.Tensor, use: Visitor) -> None:
        """Call `use` with the content of a parameter, buffer or state, given by the tensor that stands for it."""
        name = self._offloading.offloaded().get(id(tensor)) if self._offloading is not None else None
        if self._offloading is None or name is None:
            use(tensor.detach())
            return
        self._offloading.make_room(tensor.numel() * tensor.element_size())
        use(self._offloading.peek(name))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return shape, strides and dtype of the content, as a tensor on the meta device."""
        name = self._offloading.offloaded().get(id(tensor)) if self._offloading is not None else None
        if self._offloading is None or name is None:
            return tensor.detach().to("meta")
        return self._offloading.like(name)

    def entries(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
        """Return an entry of a file for each tensor."""

        def visit(tensor: torch.Tensor) -> Callable[[Visitor], None]:
            return lambda use: self.lend(tensor, use)

        return [Entry(name, tensor.detach(), visit(tensor)) for name, tensor in tensors]

    def replace(self, tensor: torch.Tensor, file: TensorSource, key: str) -> None:
        """Read new content for a parameter or buffer from a file."""
        name = self._names.get(id(tensor))
        if self._offloading is None or name is None or not self._offloading.has_slot(name):
            file.read(key, tensor.detach())
            return
        like = self._offloading.like(name)
        self._offloading.send_down(name)
        self._offloading.make_room(like.numel() * like.element_size())
        fresh = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=tensor.device)
        file.read(key, fresh)
        self._offloading.put(name, fresh)

    def new_state(self, parameter: torch.Tensor, state: str, file: TensorSource, key: str) -> None:
        """Read a state of a parameter from a file; it gets the parameter's layout if it has its shape."""
        assert self.optimizer is not None
        form = file.forms[key]
        name = self._names.get(id(parameter))
        offloaded = self._offloading if name is not None else None
        like = offloaded.like(name) if offloaded is not None and name is not None else parameter.detach()
        if offloaded is not None:
            offloaded.make_room(form.numel() * form.element_size())
        stride = like.stride() if like.shape == form.shape else form.stride()
        fresh = torch.empty_strided(form.shape, stride, dtype=form.dtype, device=parameter.device)
        file.read(key, fresh)
        self.set_state(parameter, state, fresh)

    def set_state(self, parameter: torch.Tensor, state: str, content: torch.Tensor) -> None:
        """Set a state of a parameter, and put it where the plan has it."""
        assert self.optimizer is not None
        name = self._names.get(id(parameter))
        if self._offloading is not None and name is not None:
            self._offloading.put(f"{name}::{state}", content)
        else:
            self.optimizer.state[parameter][state] = content

    def open(self, path: Path, hint: str) -> TensorSource:
        """Open a file of tensors, or a checkpoint that several ranks have written; `hint` is for errors."""
        return TensorFolder(path, hint=hint) if path.is_dir() else TensorFile(path, hint=hint)

    def write(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
        """Write whole tensors to one file."""
        write_tensors(path, list(entries), metadata)

    def write_torch(self, path: Path, item: Any) -> None:
        """Write nested containers with states as `torch.save` does."""
        write_torch(path, item, self.like, self.lend)

    def write_checkpoint(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        """Write a checkpoint.

        Args:
            path: where to.
            tensors: by name, the tensors of model, optimizer and schedule, or what stands for them.
            own: by name, tensors of which each process has its own, such as states of generators.
            metadata: texts to write with them.
        """
        self.write(path, self.entries({**tensors, **own}.items()), metadata)

    def sees(self, path: Path) -> bool:
        """Return whether there is something at a path, for all ranks where there are several."""
        return is_there(path)

    def together(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; where several ranks call this, none goes on if it fails for one of them."""
        return work()

    def forget_states(self) -> None:
        """Forget all optimizer states, before the optimizer loads others."""
        if self._offloading is not None:
            self._offloading.forget_states()
