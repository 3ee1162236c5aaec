"""Makes updates that can be timed and measured, from a copy of the user's optimizer on made-up parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.ir.updates import UPDATE_ALL, jointly_updated, updated_parameter
from stowage.stages.optimizers.quiet import quiet
from stowage.stages.optimizers.single import bare_step
from stowage.stages.optimizers.states import StateForm
from stowage.stages.optimizers.twin import has_states, twin_of


class Bench:
    """Makes updates of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, which is never changed.
        parameters: name -> parameter, as the optimizer knows it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = dict(parameters)

    def __call__(self, call: Call, trace: TraceTables, kind: str) -> Callable[[], None]:
        """Return the update that a call of a trace stands for."""
        if call.target == UPDATE_ALL:
            names = list(jointly_updated(call.arguments))
            values = [trace.values[v] for v in call.reads[len(names) : 2 * len(names)]]
            clipped = len(call.reads) > 2 * len(names)
        else:
            names, values = [updated_parameter(call.arguments)[0]], [trace.values[call.reads[1]]]
            clipped = len(call.reads) > 2
        forms = {n: StateForm(v.shape, v.stride, getattr(torch, v.dtype)) for n, v in zip(names, values, strict=True)}
        return self.update(forms, kind, clipped=clipped)

    def update(self, forms: Mapping[str, StateForm], kind: str, *, clipped: bool) -> Callable[[], None]:
        """Return a function that takes one step for some parameters.

        It changes the copy alone, and the global generators if the optimizer draws random numbers: call it within
        `quiet`, and do not count the time of `quiet` itself.

        Args:
            forms: name -> form of those parameters.
            kind: the kind of device (`cpu`, `cuda`).
            clipped: scale the gradients first, as clipping does.
        """
        device = torch.device(kind)
        with quiet():
            stand_ins = {name: nn.Parameter(form.empty(device).normal_()) for name, form in forms.items()}
            for name, stand_in in stand_ins.items():
                stand_in.grad = forms[name].empty(device).normal_()
            of = {id(self._parameters[name]): p for name, p in stand_ins.items()}

            def made(*, states: bool) -> _Step:
                copied = twin_of(self._optimizer, of, states=states)
                return _Step(copied, list(stand_ins.values()), device, clipped)

            if has_states(self._optimizer):
                try:
                    work = made(states=True)
                    work()
                except Exception:  # the states may be offloaded, and cannot be copied then
                    pass
                else:
                    return work
            return made(states=False)


class _Step:
    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], device: torch.device, clipped: bool
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._scale = torch.ones((), device=device) if clipped else None

    def __call__(self) -> None:
        if self._scale is not None:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], self._scale)
        bare_step(self._optimizer)
