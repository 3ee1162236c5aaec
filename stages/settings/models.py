"""Defines what `params.yaml` may say: one class for each stage, defaults included."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from stowage.stages.ir.defaults import (
    ALPHA,
    CLUSTER_FORMULATION,
    CLUSTER_SIZE,
    FORMULATION,
    MAX_BLOCKS,
    MAX_EXACT_NODES,
    MEMORY_SLOTS,
    METHOD,
    MIN_SAMPLES,
    O_ILP_GAP,
    O_ILP_SECONDS,
    PEAK_BUDGETS,
    SAVE_BUDGETS,
    SECONDS_PER_CALL,
    SOLVE_SECONDS,
    TOP_SIZE,
)
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.freezable import OVER, Distance, FreezeChoice, PolicyName, UnitKind
from stowage.stages.ir.lossy import KINDS, MAX_GRADIENT_ERROR, MEASURED_BATCHES, Lossy
from stowage.stages.ir.methods import MethodName, method_of
from stowage.stages.settings.budgets import check_budget
from stowage.stages.settings.sizes import parse_bytes

Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
SolverSeed = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
"""Seed of a solver; solvers count in 32 bits."""
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
BatchSize = Annotated[int, Field(gt=0, le=1 << 24)]
Length = Annotated[int, Field(gt=0, le=1 << 28)]
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
Every = Annotated[int, Field(ge=0, le=10_000_000)]
Samples = Annotated[int, Field(gt=0, le=10_000)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Ranks = Annotated[int, Field(gt=0, le=4096)]
Few = Annotated[int, Field(gt=0, le=1_000)]
"""Number of budgets or workers."""
Many = Annotated[int, Field(gt=0, le=100_000)]
"""Number of blocks, nodes or slots."""
_MOST_TOKENS = 1 << 27
"""Most tokens of one batch."""


def _function_path(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{text!r} does not name a function: write 'package.module:function'")
    return text


def _path(text: str) -> str:
    if not text or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text):
        raise ValueError(f"{text!r} is not the name of a file or folder")
    if len(text.encode()) > 1024 or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError("it is longer than names of files and folders are")
    return text


def is_path(text: str) -> bool:
    """Return whether a file or folder can have this name."""
    try:
        return _path(text) == text
    except ValueError:
        return False


def _class_name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError(f"{text!r} is not the name of a class")
    return text


def _budget(value: object) -> object:
    try:
        if isinstance(value, str | int) and not isinstance(value, bool):
            check_budget(value, "it")
            return value
    except ParameterError:
        pass
    raise ValueError(
        f"{value!r} is not a budget: write '50%' (of plain PyTorch's peak), '900MiB', '1.5GiB', '12GB' or bytes; "
        "'auto' (what is free), 'smallest', or '+5%' (the least memory at that slowdown)"
    )


def _size(value: object) -> object:
    try:
        if isinstance(value, str | int):
            parse_bytes(value, "it")
            return value
    except ParameterError:
        pass
    raise ValueError(f"{value!r} is not a size: write '900MiB', '1.5GiB', '12GB' or bytes")


def _address(text: str) -> str:
    host, _, port = text.removeprefix("tcp://").removeprefix("tls://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"{text!r} is not the address of a scheduler: write 'tcp://10.0.0.1:8786'")
    return text


def _kinds(value: object) -> object:
    if value is None:
        return []
    listed = [value] if isinstance(value, str) else value
    if value == "all":
        return value
    wrong = [value] if not isinstance(listed, list) else [v for v in listed if not (isinstance(v, str) and v in KINDS)]
    if wrong:
        shown = wrong[0][:40] if isinstance(wrong[0], str) else wrong[0]
        raise ValueError(f"{shown!a} is no kind of codes: write a list of some of {', '.join(KINDS)}, or all")
    return listed


Address = Annotated[str, AfterValidator(_address)]
FunctionPath = Annotated[str, AfterValidator(_function_path)]
ClassName = Annotated[str, AfterValidator(_class_name)]
PathText = Annotated[str, AfterValidator(_path)]
Budget = Annotated[str | int, BeforeValidator(_budget)]
Size = Annotated[str | int, BeforeValidator(_size)]
CodeKinds = Annotated[Literal["all"] | list[str], BeforeValidator(_kinds)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSettings(_Section):
    """Names the model; exactly one of `architecture`, `directory` and `callable` is given.

    Attributes:
        architecture: a `transformers` model type such as `gpt2`; made from its default configuration and `overrides`.
        directory: a local `transformers` checkpoint: `config.json` and, if present, safetensors weights.
        callable: `package.module:function`, a function that returns (module, sample batch as keyword arguments).
        overrides: configuration values that replace the defaults of `architecture`.
    """

    architecture: str | None = None
    directory: PathText | None = None
    callable: FunctionPath | None = None
    overrides: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        given = [name for name in ("architecture", "directory", "callable") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"exactly one of architecture, directory and callable is needed, found {found}")
        if self.architecture is None and self.overrides:
            raise ValueError(f"overrides go with architecture, not with {given[0]}: remove them")
        if problem := _too_large(self.overrides, "overrides"):
            raise ValueError(problem)
        return self


_MOST_LAYERS = 4096
_MOST = (1 << 31) - 1


def _too_large(value: JsonValue, key: str) -> str | None:
    """Return a message if a number in a model's configuration is so large that no such model can be built."""
    if isinstance(value, dict):
        return next((p for name, inner in value.items() if (p := _too_large(inner, f"{key}.{name}"))), None)
    if isinstance(value, list):
        return next((p for inner in value if (p := _too_large(inner, key))), None)
    if isinstance(value, bool) or not isinstance(value, int):
        finite = not isinstance(value, float) or math.isfinite(value)
        return None if finite else f"{key} is {value}, which is not a finite number"
    most = _MOST_LAYERS if "layer" in key.rpartition(".")[2] else _MOST
    return None if abs(value) <= most else f"{key} is {value}, and {most} is the most"


def _adamw_arguments() -> dict[str, JsonValue]:
    return {"lr": 1e-4}


class OptimizerSettings(_Section):
    """Names a class of `torch.optim` and its arguments."""

    name: ClassName = "AdamW"
    arguments: dict[str, JsonValue] = Field(default_factory=_adamw_arguments)


class ScheduleSettings(_Section):
    """Names a class of `torch.optim.lr_scheduler` and its arguments."""

    name: ClassName
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class DataSettings(_Section):
    """Says where the training data come from.

    Attributes:
        callable: `package.module:function` that makes batches: a function of `seed` and `iteration`, or one that
            returns an iterable. It takes the place of `source`, `column` and `tokenizer`.
        source: `pydoc_topics` (the text of Python's own help), or the path of a text or `.parquet` file.
        column: the text column of a `.parquet` file.
        tokenizer: directory of a local tokenizer; None for bytes.
    """

    callable: FunctionPath | None = None
    source: PathText = "pydoc_topics"
    column: str | None = None
    tokenizer: PathText | None = None

    @model_validator(mode="after")
    def _batches_or_text(self) -> DataSettings:
        text = [name for name in ("source", "column", "tokenizer") if name in self.model_fields_set]
        given = [name for name in text if getattr(self, name) not in (None, "pydoc_topics")]
        if self.callable is not None and given:
            raise ValueError(f"callable makes the batches, and {given[0]} is for text: remove one of them")
        return self

    @model_validator(mode="after")
    def _column_of_parquet(self) -> DataSettings:
        if self.column is not None and not self.source.endswith(".parquet"):
            raise ValueError(f"column is for .parquet files, and source is {self.source!r}")
        return self


class TraceSettings(_Section):
    """The training configuration, which the traced program depends on.

    Attributes:
        model: the model, see `ModelSettings`.
        batch_size, sequence_length: shape of one batch.
        loss: `package.module:function` called with the model's outputs and the batch; None for `outputs.loss`.
        optimizer: see `OptimizerSettings`; None for gradients without an update.
        seed: seed of the initial parameters.
        device: the target's device, `cpu` or `cuda`.
        ranks: processes that train the model together, each on batches of its own; each holds one shard of every
            parameter and its optimizer states.
    """

    model: ModelSettings
    batch_size: BatchSize = 4
    sequence_length: Length = 256
    loss: FunctionPath | None = None
    optimizer: OptimizerSettings | None = Field(default_factory=OptimizerSettings)
    seed: Seed = 0
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: Ranks = 1

    @model_validator(mode="after")
    def _updates_of_shards(self) -> TraceSettings:
        if self.ranks > 1 and self.optimizer is None:
            raise ValueError(f"{self.ranks} ranks exchange gradients before updates, and optimizer is null: name one")
        return self

    @model_validator(mode="after")
    def _a_batch_of_this_world(self) -> TraceSettings:
        tokens = self.batch_size * self.sequence_length
        if tokens > _MOST_TOKENS:
            raise ValueError(f"batch_size times sequence_length is {tokens:,} tokens, and {_MOST_TOKENS:,} is the most")
        return self


class ProfileSettings(_Section):
    """Says how costs are found.

    Attributes:
        costs: `measured` on the target, or `roofline` estimates from the device's rates.
        seconds_per_call: time spent on measuring one distinct call.
        min_samples: executions of one distinct call, at least.
    """

    costs: Literal["measured", "roofline"] = "measured"
    seconds_per_call: Seconds = SECONDS_PER_CALL
    min_samples: Samples = MIN_SAMPLES


class PartitionSettings(_Section):
    """Says how the graph is cut.

    Attributes:
        max_blocks: length of the chain, at most.
        cluster_size: M^l, members of a cluster inside a large block, at most (thesis 3.3).
        top_size: M^t, members of the largest cluster, at most.
        alpha: exponent of the number of nodes in the score of a cluster (equation 3.1).
    """

    max_blocks: Many = MAX_BLOCKS
    cluster_size: Annotated[int, Field(ge=2, le=100_000)] = CLUSTER_SIZE
    top_size: Many = TOP_SIZE
    alpha: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = ALPHA


class OptionsSettings(_Section):
    """Says how schedules of blocks are generated (thesis 2.5.1).

    Attributes:
        peak_budgets, save_budgets: how many budgets of each kind are tried per distinct block.
        time_limit_s: time limit of one solve.
        seed: seed of the solver.
        workers: solves at the same time; None for the number of cores. Does not change the result.
        max_exact_nodes: larger blocks are cut into clusters, and solved by those and by heuristics.
        formulation: solves smaller blocks: `retention` (intervals, by CP-SAT), or to compare with `rk_checkmate` or
            `checkmate` (by HiGHS).
        cluster_formulation: solves clusters that have clusters inside: `h_retention` (intervals, by CP-SAT), or to
            compare with `h_ilp` (thesis 3.4, by HiGHS). The table of both is in `options/sources.py`.
        task_runner: where flows solve blocks: in `threads` or `processes` of this machine, which start solver processes
            of their own, or on a `dask` cluster, where `workers` counts solver processes of one block. Does not change
            the result.
        dask_scheduler: address of the cluster's scheduler, such as `tcp://10.0.0.1:8786`.
    """

    peak_budgets: Few = PEAK_BUDGETS
    save_budgets: Few = SAVE_BUDGETS
    time_limit_s: Seconds = SOLVE_SECONDS
    seed: SolverSeed = 0
    workers: Few | None = None
    max_exact_nodes: Annotated[int, Field(ge=0, le=100_000)] = MAX_EXACT_NODES
    formulation: ClassName = FORMULATION
    cluster_formulation: ClassName = CLUSTER_FORMULATION
    task_runner: Literal["threads", "processes", "dask"] = "threads"
    dask_scheduler: Address | None = None

    @model_validator(mode="after")
    def _a_scheduler_for_dask(self) -> OptionsSettings:
        if self.task_runner == "dask" and self.dask_scheduler is None:
            raise ValueError("task_runner dask needs dask_scheduler: give its address, as tcp://10.0.0.1:8786")
        return self


class FreezeSettings(_Section):
    """Says what is frozen in each step; what is not goes on training.

    Attributes:
        rate: share of the units that is frozen, rounded down to whole units.
        policy: `ils` trains the units that moved most when they were last updated, `random` others in each step,
            `round_robin` neighbours in turn, `prefix` always the last units, `progressive` all at first and then fewer.
        units: `saving` groups parameters that save memory when they are frozen together, `parameter` takes each
            parameter of several dimensions by itself, `block` each entry of a list of modules.
        distance: how far a unit moved: `l1` is ‖Δ‖₁/‖w‖₁, `relative` the mean of |Δ/w|.
        seed: seed of `random`, and of the numbers that units begin with.
        over: the steps after which `progressive` freezes as many units as the rate says.
    """

    rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.9
    policy: PolicyName = "ils"
    units: UnitKind = "saving"
    distance: Distance = "l1"
    seed: Seed = 0
    over: Annotated[int, Field(ge=1, le=10**9)] = OVER

    def choice(self) -> FreezeChoice:
        """Return what later stages read of it."""
        return FreezeChoice(self.policy, self.rate, self.units, self.distance, self.seed, self.over)


class SolveSettings(_Section):
    """Says within what to plan the whole iteration, and how.

    Attributes:
        device_budget: device bytes that the iteration may use, everything included; a percentage is of the predicted
            total peak of plain PyTorch; `auto` is what is free on this machine, less a reserve; `smallest` the least
            memory for which there is a plan; `+5%` the least with which a step takes at most 5% longer than with
            everything kept.
        method: `rockmate`, `offmate`, or `auto` for the best of everything that applies; the others of `ir/methods.py`,
            `h_ilp` and `h_retention` among them, are there to compare with, or take the whole step as one block.
        memory_slots: resolution of memory in the dynamic program of the chain.
        time_limit_s: time limit of one solve of O-ILP, which decides what is offloaded; it is asked several times.
        gap: relative gap to the optimum at which an answer of O-ILP is good enough.
        offload_dir: a folder on a fast disk for parameters, optimizer states and activations that do not fit the device
            budget, between their uses; on a machine with a GPU for those that do not fit the host budget either. None
            for no disk.
        disk_budget: bytes that they may take there; None for what is free.
        host_budget: pinned host memory that they may take, on a machine with a GPU; None for no offloading.
        curve_points: budgets that are planned besides, for the curve of step time against budget in the report; 0 for
            none. Where a lower tier is used, or something is frozen, there is none.
        freeze: what is frozen in each step, see `FreezeSettings`; None for nothing.
    """

    device_budget: Budget = "50%"
    method: MethodName = METHOD
    memory_slots: Many = MEMORY_SLOTS
    time_limit_s: Seconds = O_ILP_SECONDS
    gap: Share = O_ILP_GAP
    offload_dir: PathText | None = None
    disk_budget: Size | None = None
    host_budget: Size | None = None
    curve_points: Annotated[int, Field(ge=0, le=1_000)] = 8
    freeze: FreezeSettings | None = None

    @model_validator(mode="after")
    def _a_tier_for_it(self) -> SolveSettings:
        if self.disk_budget is not None and self.offload_dir is None:
            raise ValueError("disk_budget needs offload_dir: name the folder in which offloaded tensors live")
        if method_of(self.method).offloads and self.offload_dir is None and self.host_budget is None:
            raise ValueError(f"method {self.method} needs a lower tier: give offload_dir, or host_budget on a GPU")
        return self


class LossySettings(_Section):
    """Gives leave to keep values for backward in fewer bits, which changes gradients.

    Attributes:
        kinds: kinds of codes that may be used, see `ir/lossy.py`; `all` for every one, none where every number must be
            plain PyTorch's.
        max_gradient_error: most that the gradient may change by: the norm of the difference over its norm. With 0
            only kinds that change nothing are used.
        batches: number of batches on which it is measured; one where a function of yours makes the batch.
    """

    kinds: CodeKinds = []
    max_gradient_error: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = MAX_GRADIENT_ERROR
    batches: Annotated[int, Field(gt=0, le=64)] = MEASURED_BATCHES

    @property
    def leave(self) -> Lossy | None:
        """Return the leave; None where there is none."""
        return Lossy(self.kinds, self.max_gradient_error) if self.kinds else None


class TrainSettings(_Section):
    """Says how the run trains.

    Attributes:
        steps: iterations.
        checkpoint_every: iterations between checkpoints.
        seed: seed of data order and dropout.
        schedule: schedule of the learning rate; None keeps it constant.
        data: the training data, see `DataSettings`.
        compare_eager: train plain PyTorch beside it and compare losses, bit for bit.
        measure_every: iterations between two whose memory is recorded by the profiler; 0 for none.
    """

    steps: Steps = 6
    checkpoint_every: Steps = 3
    seed: Seed = 0
    schedule: ScheduleSettings | None = None
    data: DataSettings = Field(default_factory=DataSettings)
    compare_eager: bool = True
    measure_every: Every = 1


class Settings(_Section):
    """All of `params.yaml`: one section for each stage but `codegen`, and leave for lossy plans."""

    trace: TraceSettings
    profile: ProfileSettings = Field(default_factory=ProfileSettings)
    partition: PartitionSettings = Field(default_factory=PartitionSettings)
    options: OptionsSettings = Field(default_factory=OptionsSettings)
    solve: SolveSettings = Field(default_factory=SolveSettings)
    lossy: LossySettings = Field(default_factory=LossySettings)
    train: TrainSettings = Field(default_factory=TrainSettings)

    @model_validator(mode="after")
    def _cut_as_the_method_wants_it(self) -> Settings:
        method = method_of(self.solve.method)
        wanted = {"partition.max_blocks": (self.partition.max_blocks, 1)} if method.whole else {}
        have: dict[str, tuple[object, object]] = {**wanted}
        if method.clusters is not None:
            have["options.cluster_formulation"] = self.options.cluster_formulation, method.clusters
        if wrong := {key: right for key, (given, right) in have.items() if given != right}:
            needed = " and ".join(f"{key} to {right}" for key, right in wrong.items())
            raise ValueError(f"solve.method {method.name} needs another graph or other schedules: set {needed}")
        return self

    @model_validator(mode="after")
    def _a_tier_of_the_device(self) -> Settings:
        if self.trace.device == "cpu" and self.solve.host_budget is not None:
            raise ValueError("solve.host_budget is for a GPU, and trace.device is cpu: give solve.offload_dir instead")
        if self.trace.device == "cuda" and self.solve.offload_dir is not None and self.solve.host_budget is None:
            raise ValueError(
                "solve.offload_dir needs solve.host_budget where trace.device is cuda: what moves between a GPU and a "
                "disk passes through pinned memory of the host"
            )
        return self
