"""The verbs of a generated step on one device: tensors by name, updates, gradients, copies, random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import EllipsisType
from typing import Any

import torch

from stowage.stages.device.events import noted_release
from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.updates import gradient_slot
from stowage.stages.runtime.clipping import apply_scale, clip_scale
from stowage.stages.runtime.dispatch import OutsideDispatch, below_autograd
from stowage.stages.runtime.executors.verbs import Form
from stowage.stages.runtime.observe.tracing import IterationRecorder
from stowage.stages.runtime.offload.offloading import Offloading
from stowage.stages.runtime.random.randomness import RandomStates
from stowage.stages.runtime.updates import run_gradient_hooks

_UNRECORDED = nullcontext()


class _Waiting(Mapping[str, torch.Tensor]):
    """Gradients in `.grad`, looked up when asked for: a mapping that referred to them would keep them in memory.

    A gradient that another plan left in the lower tier, and that this plan does not transfer, is reloaded on demand.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], offloading: Offloading | None) -> None:
        self._parameters = parameters
        self._offloading = offloading

    def __getitem__(self, name: str) -> torch.Tensor:
        gradient = self._parameters[name].grad
        if gradient is None:
            raise PlanMismatchError(f"The plan adds to the gradient of '{name}', but its `.grad` is None.")
        if self._offloading is not None:
            self._offloading.fetch(gradient_slot(name))
        return gradient

    def __iter__(self) -> Iterator[str]:
        return (name for name, p in self._parameters.items() if p.grad is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SingleIteration:
    """The surroundings of one generated step on one device; see `Iteration`.

    Code of others that a step calls finds PyTorch as it is where this object is made. `updated` receives the names of
    parameters whose update has run, or has begun on the CPU.
    """

    def __init__(
        self,
        *,
        parameter: Mapping[str, torch.Tensor],
        buffer: Mapping[str, torch.Tensor],
        input: Mapping[str, torch.Tensor],
        constant: Mapping[str, torch.Tensor],
        outside: Mapping[str, torch.Tensor] | None = None,
        random: RandomStates,
        update: Callable[[str, torch.Tensor], None],
        update_some: Callable[[Mapping[str, torch.Tensor]], None],
        update_all: Callable[[Mapping[str, torch.Tensor]], None],
        offloading: Offloading | None = None,
        recorder: IterationRecorder | None = None,
        on_update: Callable[[str, torch.Tensor], None] | None = None,
        number: Mapping[str, Any] | None = None,
        updated: list[str] | None = None,
        active: Callable[..., bool] | None = None,
    ) -> None:
        self._outside = OutsideDispatch()
        self._updated = updated if updated is not None else []
        self.number = number or {}
        self.parameter = parameter
        self.gradient: Mapping[str, torch.Tensor] = _Waiting(parameter, offloading)
        self.grad_norm: torch.Tensor | None = None
        self.left: Sequence[torch.Tensor] = ()
        self.buffer = buffer
        self.input = input
        self.constant = constant
        self.outside = outside or {}
        self.random = random
        self._update = update
        self._update_some = update_some
        self._update_together = update_all
        self._offloading = offloading
        self._recorder = recorder
        self._on_update = on_update
        self._active = active

    def begin(self, label: str) -> None:
        """Begin a step of the cycle."""
        self._keep_to_limit()
        if self._recorder is not None:
            self._recorder.begin(label)

    def active(self, *names: str | EllipsisType) -> bool:
        """Return whether one of some units trains in this run; everything does where nothing is frozen."""
        return self._active is None or self._active(*names)

    def _keep_to_limit(self) -> None:
        if self._offloading is not None:
            self._offloading.keep_to_limit()

    def _span(self, stream: PlanAction, name: str) -> AbstractContextManager[None]:
        return self._recorder.span(stream, name) if self._recorder is not None else _UNRECORDED

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run kernels that look at the gradient mode with it on, as in a plain forward, yet record nothing."""
        with torch.enable_grad(), below_autograd():
            yield

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand out what forward and loss leave in the user's objects."""
        self.left = tensors

    def clip(self, norms: Sequence[torch.Tensor | None], max_norm: float) -> torch.Tensor:
        """Return the factor that clips gradients by their global norm, and remember the norm."""
        self.grad_norm, scale = clip_scale([norm for norm in norms if norm is not None], max_norm)
        return scale

    def update(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Update one parameter now; its gradient is complete. A scale clips the gradient first."""
        waited = self.parameter[name].grad is gradient
        with self._outside.again():
            if self._on_update is not None:
                self._on_update(name, gradient)
            self._keep_to_limit()
            with self._span("update", name):
                if scale is not None:
                    apply_scale([gradient], scale)
                self._update(name, gradient)
        self._updated.append(name)
        if waited:
            with noted_release(gradient):
                pass

    def update_together(self, gradients: Mapping[str, torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Update some parameters now, by one step of the optimizer that knows no others.

        A scale clips the gradients first.
        """
        self._several(gradients, scale, self._update_some, f"{len(gradients)} parameters")

    def update_all(self, gradients: Mapping[str, torch.Tensor | None], scale: torch.Tensor | None = None) -> None:
        """Run one step of the optimizer for all parameters that train; every gradient is complete.

        A scale clips them first.
        """
        there = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self._several(there, scale, self._update_together, "all parameters")

    def _several(
        self,
        gradients: Mapping[str, torch.Tensor],
        scale: torch.Tensor | None,
        update: Callable[[Mapping[str, torch.Tensor]], None],
        label: str,
    ) -> None:
        waited = [g for name, g in gradients.items() if self.parameter[name].grad is g]
        with self._outside.again():
            for name, gradient in gradients.items() if self._on_update is not None else ():
                assert self._on_update is not None
                self._on_update(name, gradient)
            self._keep_to_limit()
            with self._span("update", label):
                if scale is not None and gradients:
                    apply_scale(list(gradients.values()), scale)
                update(gradients)
        self._updated.extend(gradients)
        for gradient in waited:
            with noted_release(gradient):
                pass

    @property
    def _tier(self) -> Offloading:
        if self._offloading is None:
            raise PlanMismatchError("The plan offloads, but no lower tier was given: pass offload_dir.")
        return self._offloading

    def offload(self, name: str, activation: torch.Tensor | None = None) -> None:
        """Start copying a parameter, a state or an activation to the lower tier."""
        self._tier.offload(name, activation)

    def reload(self, name: str) -> None:
        """Start copying to the device, into memory that is taken now."""
        self._tier.reload(name)

    def wait(self, name: str) -> torch.Tensor | None:
        """Wait for the copy of `name`, and return an activation that was reloaded."""
        if self._recorder is None:
            return self._tier.wait(name)
        with self._span("wait", f"wait for {name}"):
            return self._tier.wait(name)

    def free(self, name: str) -> None:
        """Drop the device's copy of a parameter or state."""
        self._tier.free(name)

    def update_on_cpu(self, name: str, gradient: str, scale: str | None = None, *, form: Form | None = None) -> None:
        """Start the update of a parameter by the CPU, on the weight, the states and the gradient in the lower tier.

        A scale, in the lower tier too, clips the gradient first. `form` is given if the gradient is a view of what was
        offloaded.
        """
        self._tier.update(name, gradient, scale, form)
        self._updated.append(name)

    def gather(self, key: str, names: Sequence[str]) -> None:
        """Refuse: one device has nobody to gather from.

        Raises:
            PlanMismatchError: the plan is of several ranks.
        """
        raise self._alone()

    def gathered(self, key: str) -> Sequence[torch.Tensor]:
        """Refuse, as `gather` does."""
        raise self._alone()

    def scatter(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Refuse, as `gather` does."""
        raise self._alone()

    def scattered(self, key: str) -> Sequence[torch.Tensor]:
        """Refuse, as `gather` does."""
        raise self._alone()

    @staticmethod
    def _alone() -> PlanMismatchError:
        return PlanMismatchError("The plan is of several ranks, and runs in one process: pass `group` to fit.")

    def changed(self, name: str) -> None:
        """Mark the copy of `name` in the lower tier as out of date, because the content on the device has changed."""
        self._tier.forget_copies([name])

    def keep_offloaded(self, name: str) -> None:
        """Put a stand-in into `.grad` for a gradient that has just been offloaded."""
        self._tier.keep_gradient(name)

    def keep(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Leave a gradient in `.grad`, added to what is there, as `loss.backward()` does. A scale clips it first."""
        if scale is not None:
            apply_scale([gradient], scale)
        parameter = self.parameter[name]
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        with self._outside.again():
            run_gradient_hooks(parameter)
