"""`fit`: a training step within a memory budget, for a model object in anyone's script."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage.flows import _saving
from stowage.flows._planning import QUICK, Effort, Loss, Planned, home_folder, plan_step, target_device
from stowage.flows._tiers import LowerTier, lower_tier
from stowage.flows._weights import LateWeights
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import TraceSpan
from stowage.stages.ir.spans import chrome_trace, predicted_spans
from stowage.stages.ir.table import write_atomically
from stowage.stages.runtime import Program
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.contents import Contents
from stowage.stages.runtime.measure import Measurement, measure_program
from stowage.stages.runtime.offloading import Offloading
from stowage.stages.runtime.tracing import trace_iteration
from stowage.stages.train import checkpoint
from stowage.stages.workload import BatchSignature, ModelSignature, batch_signature, model_signature

Progress = Callable[[str], None]
_Key = tuple[BatchSignature, ModelSignature]


class TrainingStep:
    """One training iteration under a plan; call it with a batch.

    A plan is valid for one signature: batch structure, shapes and dtypes, non-tensor arguments, train/eval flags,
    `requires_grad`. It is checked on every call; a new signature is planned when it first appears, from warm stores.

    Attributes:
        model: the module, with current weights.
        optimizer: the optimizer that holds the states, or None when gradients stay in `.grad`.
        planned: the plan of the latest call with its tables; `plan` is its summary.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        make_plan: Callable[[Any, dict[str, torch.Tensor]], Planned],
        late: LateWeights,
        lower: LowerTier | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._make_plan = make_plan
        self._late = late
        self._lower = lower
        self._offloading: Offloading | None = None
        self._programs: list[tuple[_Key, Planned, Program]] = []

    @property
    def planned(self) -> Planned:
        """The plan of the latest call, with its tables."""
        return self._programs[0][1]

    @property
    def plan(self) -> PlanSummary:
        """What the plan of the latest call states about itself."""
        return self.planned.summary

    def prepare(self, batch: Any) -> Program:
        """The program for this batch's signature, planned now if it is new.

        Raises:
            StowageError: the step cannot be traced or planned.
        """
        key = (batch_signature(batch), model_signature(self.model))
        for position, (known, _, program) in enumerate(self._programs):
            if known == key:
                if position:
                    self._programs.insert(0, self._programs.pop(position))
                return program
        away = self._offloading.layouts() if self._offloading is not None else {}
        planned = self._make_plan(batch, self._late.layouts | away)
        offloading = self._offloading_for(planned)
        self._late.load(offloading, planned.slots)
        program = bind(
            planned.source,
            planned.manifest.source_hash,
            str(planned.folder / "step.py"),
            planned.trace,
            self.model,
            self.optimizer,
            planned.slots,
            offloading,
        )
        self._programs.insert(0, (key, planned, program))
        return program

    def _offloading_for(self, planned: Planned) -> Offloading | None:
        """One tier for all programs of the model, opened when the first plan needs it."""
        if self._offloading is None and planned.slots and self._lower is not None:
            self._offloading = Offloading(self._lower.open(), self.model, self.optimizer)
        return self._offloading

    @contextlib.contextmanager
    def on_device(self) -> Iterator[nn.Module]:
        """The model with all parameters and optimizer states in device memory, whatever the budget: evaluate, save.

        The next step puts them back where its plan wants them.
        """
        if self._offloading is not None:
            self._offloading.fetch_all()
        yield self.model
        if self._offloading is not None:
            self._offloading.forget_copies()

    def _contents(self) -> Contents:
        """Tensors wherever they are, one at a time; what the plan has below is there."""
        self._programs[0][2].enter()
        return Contents(self.model, self.optimizer, self._offloading)

    def save(self, path: str | Path, scheduler: Any = None) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, the schedule if given, the random state.

        This and the functions below go tensor by tensor, within the budget; files are safetensors, complete or absent.
        """
        checkpoint.save_checkpoint(Path(path), "", 0, self._contents(), scheduler, [])

    def load(self, path: str | Path, scheduler: Any = None) -> None:
        """Go on from what `save` wrote: the numbers that follow are those of a run that was not interrupted.

        Raises:
            StowageError: there is no such file, it is damaged, or of another model.
        """
        if checkpoint.load_checkpoint(Path(path), "", self._contents(), scheduler) is None:
            raise ParameterError(f"There is no checkpoint at {path}.")

    def save_model(self, path: str | Path) -> None:
        """Weights and persistent buffers under the names of `state_dict`; `safetensors.torch.load_model` reads it."""
        _saving.save_model(Path(path), self._contents())

    def load_model(self, path: str | Path) -> None:
        """Replace weights and persistent buffers by those of a safetensors file."""
        _saving.load_model(Path(path), self._contents())

    def save_optimizer(self, path: str | Path) -> None:
        """The optimizer's `state_dict`, as safetensors; `load_optimizer` reads it."""
        checkpoint.save_optimizer(Path(path), self._contents())

    def load_optimizer(self, path: str | Path) -> None:
        """Replace the optimizer's groups and states by those of a file."""
        checkpoint.load_optimizer(Path(path), self._contents())

    def save_pretrained(self, folder: str | Path) -> None:
        """As `model.save_pretrained(folder)` of a `transformers` or `peft` model."""
        _saving.save_pretrained(Path(folder), self._contents())

    def __call__(self, batch: Any) -> torch.Tensor:
        """One iteration: forward, backward, update. Returns the loss."""
        return self.prepare(batch)(batch)

    def trace(self, batch: Any, path: str | Path) -> list[TraceSpan]:
        """One iteration, a real one, which trains; where its time goes, as a Chrome trace beside the prediction.

        https://ui.perfetto.dev opens the file. The spans are returned too.
        """
        program = self.prepare(batch)
        _, measured = trace_iteration(program, lambda: program(batch))
        plan = self.planned
        spans = [*predicted_spans(plan.rows, plan.nodes, plan.slots), *measured]
        labels = {"plan": plan.summary.plan_hash, "method": plan.summary.method, "device": plan.summary.device}
        write_atomically(Path(path), chrome_trace(spans, labels).encode())
        return spans

    def measure(self, batch: Any) -> Measurement:
        """One iteration under the profiler: a real one, which trains, and slower. See `Measurement.peak_bytes`."""
        return measure_program(self.prepare(batch), self.model, self.optimizer, batch)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def fit(
    model: nn.Module,
    batch: Any,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    *,
    device_budget: str | int,
    loss: Loss | None = None,
    method: str = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    offload_dir: str | Path | None = None,
    weights: str | Path | None = None,
    cache_dir: str | Path | None = None,
    quick: bool = False,
    say: Callable[[str], None] = _say,
) -> TrainingStep:
    """Plan the training step of `model` on batches like `batch` within `device_budget`.

    Args:
        model: any `nn.Module`, in the mode it trains in; one built under `torch.device("meta")` gets its `weights`.
        batch: a sample: a mapping is passed as keywords, a tuple or list as positions, anything else as one argument.
        optimizer: makes an optimizer from parameters; None leaves gradients in `.grad`.
        device_budget: device bytes of the whole iteration (parameters, gradients, optimizer states, activations,
            buffers, inputs, workspace): `900MiB`, `1.5GiB`, bytes, or `50%` of the predicted peak of plain PyTorch.
        loss: `loss(outputs, batch)`; by default `outputs.loss`.
        method: `auto` picks; `rockmate` forces RK-Checkmate and RK-Rotor; `offmate` forces offloading.
        host_budget: pinned host memory that a model on a GPU may use for parameters, optimizer states and activations.
        disk_budget: bytes that they may take in `offload_dir`; by default what is free there.
        offload_dir: a folder on a fast disk; on a machine without a GPU what does not fit `device_budget` lives there.
        weights: a safetensors file, or a folder of them, for a model on the meta device: each tensor is read straight
            into the tier where it lives, so that the model may be larger than RAM.
        cache_dir: where costs, options and plans are kept; default `STOWAGE_HOME` or the user's cache folder.
        quick: plan in seconds instead of a minute or so, less well: fewer samples of each operation, fewer schedules.
        say: receives notices, one sentence each.

    Raises:
        Infeasible: the budget cannot be met; it states the smallest feasible one.
        TraceError: the model cannot be traced; the text names the module and the line.
        ParameterError: an argument is wrong.
    """
    late = LateWeights(model, batch, weights)
    made = optimizer(list(model.parameters())) if optimizer is not None else None
    home = home_folder(cache_dir)
    device = next((p.device.type for p in model.parameters()), "cpu")
    lower = lower_tier(
        target_device(device, home),
        host_budget=host_budget,
        disk_budget=disk_budget,
        offload_dir=offload_dir,
        method=method,
    )

    def make_plan(sample: Any, layouts: dict[str, torch.Tensor]) -> Planned:
        notices: list[str] = []
        with torch.random.fork_rng():  # planning must not change what the user's generators give next
            planned = plan_step(
                model,
                sample,
                loss=loss,
                optimizer=made,
                device_budget=device_budget,
                method=method,
                home=home / "quick" if quick else home,
                effort=QUICK if quick else Effort(),
                notices=notices,
                below=lower.below if lower else None,
                layouts=layouts,
            )
        for notice in notices:
            say(notice)
        return planned

    step = TrainingStep(model, made, make_plan, late, lower)
    step.prepare(batch)
    return step
