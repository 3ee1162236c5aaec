"""Evaluation within the budget: forward-only plans of a model, made when a batch of a new form first appears."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows._planning import Effort, Planned, finish, target_device
from stowage.flows._shadow import Net
from stowage.flows._true_kernels import with_true_kernels
from stowage.stages.ir.errors import StaleStep
from stowage.stages.ir.trace import Storage
from stowage.stages.partition.forward import forward_nodes
from stowage.stages.profile import CostStore, profile_trace
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.solve import Below
from stowage.stages.solve.forward import solve_forward
from stowage.stages.trace import Left
from stowage.stages.trace.forward import Forward, RecordedForward, forward_tables, record_forward
from stowage.stages.workload import batch_signature, model_signature
from stowage.stages.workload.autocast import without_autocast
from stowage.stages.workload.outputs import OutputForm

_AWAY = ("below", "updating")


@dataclass(frozen=True)
class Resting:
    """What of a model is where between training iterations.

    Attributes:
        budget_bytes: the device budget.
        away: names of parameters and states (`parameter::state`) that are below the device.
        beside: storages that a forward does not use: optimizer states, and gradients that wait.
        tier_in_use: the training plan uses a tier below.
    """

    budget_bytes: int
    away: frozenset[str]
    beside: tuple[Storage, ...]
    tier_in_use: bool

    @staticmethod
    def of(planned: Planned, model: nn.Module) -> Resting:
        """As the latest training plan has it."""
        waiting = [
            Storage(0, p.grad.untyped_storage().nbytes(), "gradient", name)
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
        return Resting(
            planned.summary.device_budget_bytes,
            frozenset(s.name for s in planned.slots if s.role != "temporary" and s.start in _AWAY),
            (*(s for s in planned.trace.storages if s.role == "state"), *waiting),
            bool(planned.slots),
        )


def plan_forward(
    model: nn.Module,
    recorded: RecordedForward,
    resting: Resting,
    *,
    home: Path,
    effort: Effort,
    below: Below | None,
) -> Planned:
    """Profile → partition → solve → codegen of a forward alone.

    Raises:
        StowageError: see the stages; `Infeasible` when the budget cannot be met.
    """
    trace = forward_tables(recorded, model, resting.beside)
    target = target_device(trace.meta.device, home)
    costs = profile_trace(
        trace,
        target,
        CostStore(home / "costs"),
        seconds_per_call=effort.seconds_per_call,
        min_samples=effort.min_samples,
    )
    nodes = forward_nodes(trace, {c.signature: c for c in costs})
    solved = solve_forward(
        trace,
        nodes,
        device_budget_bytes=resting.budget_bytes,
        below=below,
        away=frozenset(
            s.storage for s in trace.storages if s.name in resting.away and s.role in ("parameter", "state")
        ),
        tier_in_use=resting.tier_in_use,
        device=target.name,
        device_fingerprint=target.fingerprint,
    )
    return finish(trace, nodes, [], [], solved, home, solved.summary.keep_all_peak_bytes)


MakeForwardPlan = Callable[[RecordedForward, Resting], Planned]


@dataclass(frozen=True)
class _Known:
    key: tuple[Any, ...]
    planned: Planned
    program: Program
    form: OutputForm
    left: Left
    returns: int


class Evaluations:
    """Evaluates one model under plans.

    Attributes:
        planned: the plan of the latest call; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        make_plan: MakeForwardPlan,
        layouts: Callable[[], Mapping[str, torch.Tensor]],
        offloading: Callable[[Planned], Offloading | None],
        tracing: Callable[[], AbstractContextManager[None]],
        net: Net,
        say: Callable[[str], None],
    ) -> None:
        """`layouts` tells how parameters lie that are not in memory, `offloading` has the tier for a plan, `tracing`
        lets modules be called whose weights are below."""
        self._model = model
        self._make_plan = make_plan
        self._layouts = layouts
        self._offloading = offloading
        self._tracing = tracing
        self._net = net
        self._say = say
        self._known: list[_Known] = []

    @property
    def planned(self) -> Planned | None:
        """See above."""
        return self._known[0].planned if self._known else None

    def forget(self) -> None:
        """Forget every plan."""
        self._known.clear()

    def __call__(self, batch: Any, forward: Forward, resting: Resting) -> Any:
        """`forward(model, batch)` in evaluation mode and without gradients, with `resting` before and after."""
        with evaluation_mode(self._model):
            known = self._find(batch, forward, resting)
            outputs: list[torch.Tensor] = []

            def work() -> list[torch.Tensor]:
                outputs[:] = known.program.forward(batch)
                return outputs[: known.returns]

            try:
                tensors = self._net.run_forward(known.program, known.planned, batch, forward, work)
            except StaleStep:
                self._known.remove(known)
                raise
            known.left.apply(outputs[known.returns :])
            return known.form.fill(tensors)

    def _find(self, batch: Any, forward: Forward, resting: Resting) -> _Known:
        key = (forward, batch_signature(batch), model_signature(self._model), resting)
        for position, known in enumerate(self._known):
            if known.key == key:
                self._known.insert(0, self._known.pop(position))
                return known

        def plan() -> tuple[RecordedForward, Planned]:
            with self._tracing():
                recorded = record_forward(self._model, batch, forward, self._layouts())
            for notice in recorded.notices:
                self._say(notice)
            with without_autocast():
                return recorded, self._make_plan(recorded, resting)

        with torch.random.fork_rng():
            recorded, planned = with_true_kernels(plan)
        program = bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self._model,
            None,
            planned.slots,
            self._offloading(planned),
            recorded.outside,
        )
        self._known.insert(0, _Known(key, planned, program, recorded.form, recorded.left, recorded.returns))
        return self._known[0]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """As `model.eval()`; afterwards every module is in the mode in which it was."""
    modes = {module: module.training for module in model.modules()}
    if not any(modes.values()):
        yield
        return
    model.eval()
    try:
        yield
    finally:
        if modes[model]:
            model.train()
        for module, training in modes.items():
            module.training = training
