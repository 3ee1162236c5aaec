"""Ask a card what must hold, measure it, plan, train and compare on a machine with a GPU.

python -m stowage.flows.gpu first --out FOLDER    there: the first ten minutes on a card -> FOLDER/first.md
python -m stowage.flows.gpu race --out FOLDER     there: the 7B race from start to end -> FOLDER/race.md
python -m stowage.flows.gpu ranks --out FOLDER    there: one model on all cards, sharded -> FOLDER/ranks.md
python -m stowage.flows.gpu                       measure, plan and train once, where everything is installed; with
                                                  two or more cards, `ranks` too
python -m stowage.flows.gpu measure --out FOLDER  there: tests, rates, trace and costs -> FOLDER/measured.tar.gz
python -m stowage.flows.gpu plan --out FOLDER     anywhere: plans -> FOLDER/planned.tar.gz
python -m stowage.flows.gpu train --out FOLDER    there: trains under the plans, beside peers -> FOLDER/table.parquet

None of this has run on a card yet; with --device cpu all of it runs on a CPU, and that is tested.

`first` asks what must hold, in order, each in a process of its own with a time limit: versions, and which attention
PyTorch takes; every call of GPT-2 with dropout; the tests of tests/gpu; plans by simple rules against plain PyTorch,
bit for bit; the same while copies or computing are late, which shows a missing wait; plain PyTorch against itself; what
is idle in an eager step; then measure, plan, train and plain PyTorch on 8 layers of the 7B shape; and a small GPT-2,
host against card; and the rest of tests/gpu. Each result is a file in FOLDER/steps, and first.md has all of them on one
page after every step. The same call again goes on after the last finished step; --again STEP repeats one, --again fell
those that did not hold.

`race` measures, plans and trains Llama2-7B's shape within 12 GB: in bfloat16, in float32 too if the host has room, and
once with deterministic kernels and 8 layers, where losses and weights must be equal bit for bit. The same call again
goes on at the contestant that was next; --again PART repeats contestants with PART in their name, `measure`, `plan`,
`fell` or `all`.

`ranks` trains GPT-2 small on all cards, each with a shard of every parameter under one plan, beside
DistributedDataParallel, FSDP2 as people apply it, and FSDP2 as `shard` does, each within the same budgets: whether
losses and weights are equal, peaks, and medians and quartiles of times, taken in turn. A rank's plan may use its share
of the host. It plans there, so all of Stowage must be installed. The same call again goes on after the last finished
step, with --again as for `first`.

Where this machine cannot plan, both say which file to carry to one that can, and go on when its answer is there. Two
machines carry one small file each way. `first`, `race`, `measure` and `train` need torch, transformers, pyarrow and
safetensors alone (tests need pytest); nothing needs to be installed there: `PYTHONPATH=build/typing`, see
`make build/typing/stowage`.

Exit status: 0, done; 1, an error, or something of `first` did not hold; 3, not done: give the same call again, perhaps
after carrying a file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from stowage.flows.benchmarks.gpu.carried import MEASURED, PLANNED, carried_job
from stowage.flows.benchmarks.gpu.first.first import BUDGET_S, first, steps_of
from stowage.flows.benchmarks.gpu.first.page import PAGE
from stowage.flows.benchmarks.gpu.first.tests import TESTS
from stowage.flows.benchmarks.gpu.job import GpuJob, parameters_of
from stowage.flows.benchmarks.gpu.measure import fitting_dtype, measure_job
from stowage.flows.benchmarks.gpu.race import ALLOCATOR, race
from stowage.flows.benchmarks.gpu.ranks.page import PAGE as RANKS_PAGE
from stowage.flows.benchmarks.gpu.ranks.whole import (
    SMALL,
    RanksEffort,
    job_of_ranks,
    ranks_here,
    run_ranks,
    steps_of_ranks,
)
from stowage.flows.benchmarks.gpu.table import text_of
from stowage.flows.benchmarks.gpu.whole_race import PAGE as RACE_PAGE
from stowage.flows.benchmarks.gpu.whole_race import RaceEffort, jobs_of, notes_of, report_of, run_race
from stowage.stages.device.heap import available_bytes
from stowage.stages.ir.command import INTERRUPTED_STATUS, Parser
from stowage.stages.ir.errors import ParameterError, StowageError

BATCH, LENGTH = 4, 512
"""Samples and tokens of a batch by default."""

HOST_SHARE = 0.85
"""Share of the free host memory that a plan may take by default."""

UNFINISHED_STATUS = 3
"""Exit status where the same call has to be given again, perhaps after something was carried."""


def say(text: str) -> None:
    """Print a text at once."""
    print(text, flush=True)


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "step", nargs="?", default="all", choices=("all", "first", "race", "ranks", "measure", "plan", "train")
    )
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmark/gpu"), help="folder of all files")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the same path without a GPU")
    parser.add_argument("--architecture", default="llama", help="of transformers; llama is Llama2-7B's shape")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=NUMBER", help="of its configuration")
    parser.add_argument("--batch", type=int, help="samples; 4 by default, 8 of `ranks` on cards, and 2 on a CPU")
    parser.add_argument("--length", type=int, help="tokens; 512 by default, 1024 of `ranks` on cards, and 32 on a CPU")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as host RAM has room"
    )
    parser.add_argument("--limit-gb", type=float, default=12.0, help="of a process on the device, 1e9 bytes")
    parser.add_argument(
        "--host-gb", type=float, help=f"host memory for what is offloaded; by default {HOST_SHARE} of what is free"
    )
    parser.add_argument(
        "--fraction", type=float, action="append", help="of the limit to plan for; default 0.95 and 0.85"
    )
    parser.add_argument("--method", default="auto", help="of planning: auto, offmate, rockmate")
    stores = Path(".stowage/gpu")
    parser.add_argument("--stores", type=Path, default=stores, help="stores of the planning machine")
    parser.add_argument("--quick", action="store_true", help="plan and measure in seconds, less well")
    parser.add_argument("--ranks", type=int, help="of `ranks`: processes, one for each card by default; on a CPU two")
    parser.add_argument("--rounds", type=int, default=3, help="of `ranks`: how often each contestant is timed, in turn")
    parser.add_argument("--model", default="gpt2", choices=tuple(SMALL), help="of `ranks`: what is trained")
    parser.add_argument("--steps", type=int, default=5, help="timed iterations of each contestant")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help="contestants with this in their name; of `first`: a step",
    )
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds of one contestant")
    parser.add_argument(
        "--allocator", default=ALLOCATOR, help="of the contestants: PYTORCH_ALLOC_CONF, its old name too"
    )
    parser.add_argument("--budget-s", type=float, help=f"of `first`, {BUDGET_S:.0f} by default, or `race`, endless")
    parser.add_argument(
        "--again", action="append", default=[], metavar="PART", help="of `first` and `race`: repeat what has a result"
    )
    parser.add_argument("--no-strict", action="store_true", help="of `race`: leave out the job that is about equality")
    parser.add_argument("--no-tests", action="store_true", help="leave out tests/gpu")
    return parser.parse_args(words)


def job_of(given: argparse.Namespace) -> GpuJob:
    """Return the configuration that the command line asks for.

    Raises:
        ParameterError: a setting is no `key=number`, or there is no GPU.
    """
    check_device(given.device)
    free = available_bytes()
    job = GpuJob(
        architecture=given.architecture,
        overrides=overrides_of(given),
        batch_size=given.batch or BATCH,
        sequence_length=given.length or LENGTH,
        dtype="float32" if given.dtype == "auto" else given.dtype,
        device=given.device,
        limit_bytes=int(given.limit_gb * 1e9),
        host_bytes=int(given.host_gb * 1e9) if given.host_gb else int(HOST_SHARE * free),
    )
    if given.dtype == "auto":
        job = replace(job, dtype=fitting_dtype(parameters_of(job), free))
    return job


def overrides_of(given: argparse.Namespace) -> dict[str, int]:
    """Return what `--set` changes.

    Raises:
        ParameterError: a setting is no `key=number`.
    """
    overrides: dict[str, int] = {}
    for setting in given.set:
        key, equals, value = setting.partition("=")
        if not equals or not value.lstrip("-").isdigit():
            raise ParameterError(f"--set {setting} is not key=number: write, for example, num_hidden_layers=8.")
        overrides[key] = int(value)
    return overrides


def run_tests(out: Path) -> None:
    """Run `tests/gpu`, with a log; failures are printed, and measuring continues."""
    if not TESTS.is_dir():
        say("tests/gpu is not here: left out")
        return
    out.mkdir(parents=True, exist_ok=True)
    words = ["-q", "-rs", "--tb=short", "--maxfail=50", f"--confcutdir={TESTS}"]  # outer conftest.py need more
    command = [sys.executable, "-m", "pytest", str(TESTS), *words]
    done = subprocess.run(command, cwd=TESTS.parents[1], capture_output=True, text=True)
    (out / "tests.txt").write_text(done.stdout + done.stderr)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    say(f"tests/gpu: {lines[-1]} ({out / 'tests.txt'})")


def plan(given: argparse.Namespace) -> None:
    """Run the step that needs solvers."""
    from stowage.flows.benchmarks.gpu.plan import plan_job
    from stowage.flows.planning.step import QUICK, Effort

    plan_job(
        given.out,
        say,
        fractions=given.fraction or (0.95, 0.85),
        method=given.method,
        stores=given.stores,
        effort=QUICK if given.quick else Effort(),
    )


def run_first(given: argparse.Namespace) -> int:
    """Run the first minutes; return status 1 where something did not hold."""
    check_device(given.device)
    found = first(
        given.out,
        given.device,
        say,
        host_bytes=int(given.host_gb * 1e9) if given.host_gb else int(HOST_SHARE * available_bytes()),
        budget_s=BUDGET_S if given.budget_s is None else given.budget_s,
        again=given.again,
        only=given.only,
    )
    names = given.only or [step.name for step in steps_of(given.device, given.out, 0)]
    say(f"{given.out / PAGE}")
    if any(result.status in ("fell", "timed out") for result in found.values()):
        return 1
    return 0 if all(name in found and found[name].finished for name in names) else UNFINISHED_STATUS


def run_all_ranks(given: argparse.Namespace) -> int:
    """Run the contestants on all cards; return status 1 where something did not hold."""
    check_device(given.device)
    ranks = ranks_here(given.device, given.ranks)
    job = job_of_ranks(given.device, overrides_of(given), given.batch, given.length, given.model)
    effort = RanksEffort(given.steps, given.rounds, given.quick)
    found = run_ranks(
        given.out,
        job,
        ranks,
        say,
        effort=effort,
        host_bytes=int(given.host_gb * 1e9) if given.host_gb else int(HOST_SHARE * available_bytes()),
        budget_s=math.inf if given.budget_s is None else given.budget_s,
        again=given.again,
        only=given.only,
    )
    say((given.out / RANKS_PAGE).read_text())
    say(f"{given.out / RANKS_PAGE}")
    if any(result.status in ("fell", "timed out") for result in found.values()):
        return 1
    names = given.only or [step.name for step in steps_of_ranks(job, ranks, given.out, effort)]
    return 0 if all(name in found and found[name].finished for name in names) else UNFINISHED_STATUS


def of_ranks_alone(given: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments without what says which model is measured, planned and trained on one card."""
    return argparse.Namespace(**{**vars(given), "set": [], "batch": None, "length": None, "only": [], "again": []})


def run_whole_race(given: argparse.Namespace) -> int:
    """Run the race; return status 3 where something must be carried first, or the time was used up."""
    job = job_of(given)
    dtypes = [job.dtype]
    if given.dtype == "auto":  # a race that was begun in float32 continues, whatever is free now
        begun = (given.out / "float32" / MEASURED).is_file()
        dtypes = ["bfloat16", "float32"] if begun or job.dtype == "float32" else ["bfloat16"]
    seconds, samples = (0.005, 2) if given.quick else (0.05, 5)
    jobs = jobs_of(job, dtypes, strict=not given.no_strict)
    raced = run_race(
        jobs,
        given.out,
        say,
        RaceEffort(given.steps, seconds, samples, given.quick, given.timeout, given.budget_s or math.inf),
        fractions=given.fraction or (0.95, 0.85),
        method=given.method,
        stores=given.stores,
        only=given.only,
        again=given.again,
        allocator=given.allocator,
    )
    say(report_of(jobs, raced.tables))
    say(f"{given.out / RACE_PAGE}")
    return UNFINISHED_STATUS if raced.missing else 0


def check_device(device: str) -> None:
    """Refuse a device that is not here.

    Raises:
        ParameterError: there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ParameterError("There is no CUDA device here: run this on the machine that has it, or give --device cpu.")


def main(words: list[str]) -> int:
    """Run one step, or all."""
    given = arguments_of(words)
    try:
        if given.step == "first":
            return run_first(given)
        if given.step == "ranks":
            return run_all_ranks(given)
        if given.step == "race":
            return run_whole_race(given)
        if given.step in ("all", "measure"):
            job = job_of(given)
            if not given.no_tests:
                run_tests(given.out)
            say(job.name())
            seconds, samples = (0.005, 2) if given.quick else (0.05, 5)
            measure_job(job, given.out, say, seconds_per_call=seconds, min_samples=samples)
        if given.step in ("all", "plan"):
            plan(given)
        if given.step in ("all", "train"):
            rows = race(
                given.out,
                say,
                steps=given.steps,
                only=given.only,
                timeout_s=given.timeout,
                allocator=given.allocator,
            )
            say("\n".join([*notes_of(carried_job(given.out / PLANNED), rows), text_of(rows)]))
        if given.step == "all" and given.device == "cuda" and torch.cuda.device_count() > 1:
            return run_all_ranks(of_ranks_alone(given))
    except StowageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: `first` and `race` go on from here when they are called again", file=sys.stderr)
        return INTERRUPTED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
