"""Simulates one configuration of the paper's tables under each engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stowage.flows.benchmarks.elixir.machines import DRIVER_BYTES, ElixirMachine
from stowage.flows.benchmarks.elixir.models import Gpt2
from stowage.stages.formulations.sharding.elixir.allowed import AllowedMemory
from stowage.stages.formulations.sharding.elixir.search import ElixirPlan, search
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup
from stowage.stages.simulate.parallel.chunks import simulate_chunks
from stowage.stages.simulate.parallel.deepspeed import DeepSpeedSettings, Stage, simulate_zero
from stowage.stages.simulate.parallel.outcome import ParallelOutcome
from stowage.stages.simulate.parallel.replicas import simulate_ddp, simulate_one_unit

PROCESS_BYTES = 2 * 10**9
"""Memory of the host that each process takes, Python and CUDA's libraries; assumed."""


@dataclass(frozen=True)
class Configuration:
    """A model on a number of GPUs of a machine, with a batch for each."""

    machine: ElixirMachine
    model: Gpt2
    ranks: int
    batch: int

    @property
    def parallel(self) -> ParallelMachine:
        """Return the machine with that many GPUs."""
        return self.machine.with_ranks(self.ranks)

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """Return the model's groups with their times."""
        constants = self.machine.constants
        return self.model.groups(self.batch, constants.matmul_flops, self.machine.memory_bytes_per_s)

    def tflops(self, outcome: ParallelOutcome) -> float | None:
        """Return 8 M D per second, in 10¹², or None where memory does not suffice."""
        return None if outcome.lacks(self.parallel) else self.model.flops(self.batch) / outcome.time_s / 1e12


def ddp(c: Configuration) -> ParallelOutcome:
    """Simulate DDP."""
    activation_bytes = c.model.activation_bytes(c.batch)
    return simulate_ddp(c.groups, c.parallel, activation_bytes=activation_bytes, fixed_bytes=DRIVER_BYTES)


def fsdp(c: Configuration) -> ParallelOutcome:
    """Simulate FSDP with the model as one unit."""
    activation_bytes = c.model.activation_bytes(c.batch)
    return simulate_one_unit(c.groups, c.parallel, activation_bytes=activation_bytes, fixed_bytes=DRIVER_BYTES)


def zero(c: Configuration, stage: Stage, *, offload: bool) -> ParallelOutcome:
    """Simulate DeepSpeed."""
    constants = c.machine.constants
    share = constants.zero_2_share if stage == 2 else constants.zero_3_share
    return simulate_zero(
        c.groups,
        c.parallel,
        stage,
        offload=offload,
        settings=DeepSpeedSettings(host_update_share=share, process_bytes=PROCESS_BYTES),
        activation_bytes=c.model.activation_bytes(c.batch),
        fixed_bytes=DRIVER_BYTES,
    )


def elixir_plan(c: Configuration) -> ElixirPlan:
    """Run Elixir's search."""
    model = c.model
    module = max(model.layer_parameters) + 4 * model.hidden
    allowed = AllowedMemory(
        c.machine.device_bytes,
        0,
        model.activation_bytes(c.batch),
        whole_bytes=2 * (model.tied_elements + module),
    )
    elements = [model.positions * model.hidden, *model.layer_parameters * model.layers, 2 * model.hidden]
    return search(
        elements,
        allowed.allowed(),
        c.parallel,
        segment_elements=model.layer_elements,
        whole_elements=model.tied_elements,
    )


def elixir(c: Configuration) -> ParallelOutcome:
    """Simulate Elixir's own engine with what its search found."""
    plan = elixir_plan(c)
    machine = c.parallel
    machine = replace(machine, host_updates_per_s=machine.host_updates_per_s * c.machine.constants.host_share)
    root, *layers = c.groups
    count = len(plan.chunks)
    each = -(-(c.model.elements - c.model.tied_elements) // count)
    root = replace(root, elements=c.model.tied_elements, trainable=c.model.tied_elements)
    chunk = replace(
        layers[0],
        modules=("chunk",),
        elements=each,
        trainable=each,
        forward_s=sum(g.forward_s for g in layers) / count,
        backward_s=sum(g.backward_s for g in layers) / count,
    )
    chunks = [replace(chunk, group=i + 1) for i in range(count)]
    choices = [GroupChoice(0, on_host=not plan.whole_on_device, keep=True)] + [
        GroupChoice(i + 1, on_host=i >= plan.on_device, keep=i >= count - plan.kept) for i in range(count)
    ]
    return simulate_chunks(
        [root, *chunks],
        choices,
        machine,
        blocks=plan.blocks,
        block_elements=plan.length,
        activation_bytes=c.model.activation_bytes(c.batch),
        fixed_bytes=DRIVER_BYTES,
    )


ENGINES: dict[str, Callable[[Configuration], ParallelOutcome]] = {
    "elixir": elixir,
    "ddp": ddp,
    "fsdp": fsdp,
    "zero_2": lambda c: zero(c, 2, offload=False),
    "zero_3": lambda c: zero(c, 3, offload=False),
    "zero_2_offload": lambda c: zero(c, 2, offload=True),
    "zero_3_offload": lambda c: zero(c, 3, offload=True),
}
"""Engines by the column of the published tables."""
