"""Describes the page of the Elixir paper's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, TablePage, text

ELIXIR = f"{COMMAND} elixir"
PLANNED = f"{COMMAND} elixir-plans"


def both(cell: Mapping[str, Any]) -> str:
    """Write what was simulated, and what was published beside it; bold where only one of them fits."""
    simulated, published = (_tflops(cell[key]) for key in ("simulated", "published"))
    words = f"{simulated} ({published})"
    return f"**{words}**" if (cell["simulated"] is None) != (cell["published"] is None) else words


def ratios(cell: Mapping[str, Any]) -> str:
    """Write two speed-ups likewise."""
    simulated, published = ("–" if (x := cell[key]) is None else f"{x:.2f}" for key in ("simulated", "published"))
    return f"{simulated} ({published})"


def tflops(value: float) -> str:
    """Write TFLOPS."""
    return f"{value:.0f}"


def _tflops(value: float | None) -> str:
    return "OOM" if value is None else f"{value:.0f}"


def _engines(*keys: str) -> tuple[Column, ...]:
    headings = {
        "elixir": "Elixir",
        "ddp": "DDP",
        "fsdp": "FSDP",
        "zero_2": "ZeRO-2",
        "zero_3": "ZeRO-3",
        "zero_2_offload": "ZeRO-2 off.",
        "zero_3_offload": "ZeRO-3 off.",
        "deepspeed": "DeepSpeed",
    }
    return tuple(Column(key, headings[key], both) for key in keys)


_FULL = (
    text("model", "model"),
    Column("ranks", "n"),
    text("batch", "batch"),
    *_engines("elixir", "fsdp", "zero_2", "zero_3", "zero_2_offload", "zero_3_offload"),
    Column("speedup", "speed-up", ratios),
    Column("ddp", "DDP", lambda x: x),
    Column("fsdp2", "on FSDP2", lambda x: x),
    Column("plan_b", "sharded plan", lambda x: x, optional=True),
)

_ABOUT = (
    "Simulated TFLOPS, and in brackets what the paper has; `OOM`: out of memory. *Speed-up*: Elixir over the best of "
    "DeepSpeed's settings. *On FSDP2*: the best choice for FSDP2's groups, a layer each. *Sharded plan*: see below; "
    "one that computes little again can be above the rate of matrix products; those of batch 16 on one and two "
    "GPUs are of an earlier planner. Where the present one, which knows that a collective in order waits for others, "
    "planned again, cells changed by -8 to +4%. † cells that constants were fitted to."
)

TABLE_7 = Section("elixir_7", "Table 7: A100 40 GB SXM", _ABOUT, ELIXIR, _FULL)
TABLE_8 = Section("elixir_8", "Table 8: A100 80 GB PCIe", _ABOUT, ELIXIR, _FULL)

TABLE_2 = Section(
    "elixir_2",
    "Table 2: batch 8",
    "The same rows as the paper arranges them; DeepSpeed is the best of its four settings. Published are the numbers "
    "of Tables 7 and 8; for four GPUs, GPT2-10b on 80 GB, Table 2 itself has 130 for DeepSpeed where "
    "Table 8 has 140.4.",
    ELIXIR,
    (
        text("machine", "machine"),
        Column("ranks", "n"),
        text("model", "model"),
        *_engines("elixir", "fsdp", "deepspeed"),
    ),
)

TABLE_3 = Section(
    "elixir_3",
    "Table 3: 4 GPUs",
    "For GPT2-4b, batch 12 on 40 GB, Table 3 itself has 153 for DeepSpeed where Table 7 has 161.4.",
    ELIXIR,
    (
        text("machine", "machine"),
        text("model", "model"),
        text("batch", "batch"),
        *_engines("elixir", "fsdp", "deepspeed"),
    ),
)

WITHIN = Section(
    "elixir_within",
    "How near the simulator is",
    "Cells whose TFLOPS are within 20% of the published ones. Five constants for each machine were fitted to the cells "
    "of batch 8 with one and with four GPUs; two GPUs, and all other batches, were never seen by the fit. The "
    "constants stand for the engines as a whole: one machine's updates on the host are taken as equally good a share "
    "of the profile at every n, which is too slow for ZeRO-3 offloaded on four PCIe GPUs, where most misses are.",
    ELIXIR,
    (
        text("machine", "machine"),
        text("engine", "engine"),
        Column("judged_within", "within 20%"),
        Column("judged", "of the cells not fitted"),
        Column("fitted_within", "within 20%"),
        Column("fitted", "of the fitted cells"),
    ),
)

CONSTANTS = Section(
    "elixir_constants",
    "The constants",
    "Everything else is from the paper's Tables 4 to 6, data sheets and the authors' own scripts. On the host, updates "
    "reach a third of the rate that the authors' profile measured with one large float32 tensor: gradients in half "
    "precision are cast there, results are cast back, and DeepSpeed copies them.",
    ELIXIR,
    (
        text("machine", "machine"),
        Column("matmul_flops", "matrix products", lambda x: f"{x / 1e12:.0f} TFLOPS"),
        Column("host_share", "updates on the host, Elixir", f.percent),
        Column("zero_2_share", "ZeRO-2 offloaded", f.percent),
        Column("zero_3_share", "ZeRO-3 offloaded", f.percent),
        Column("slowdown", "collectives slow computing by", f.percent),
    ),
)

FITS = Section(
    "elixir_fits",
    "Who fits",
    "Cells about which simulator and paper agree whether they fit into memory. Unlike the times, this was not judged "
    "on cells that were kept apart: the assumptions (95% of a device is usable, 1 GiB of it is the driver's, a process "
    "takes 2 GB of the host) and the reading of the authors' settings were chosen knowing all of them. GPT2-20b under "
    "ZeRO-3 offloaded on 400 GiB is a matter of 1%.",
    ELIXIR,
    (text("engine", "engine"), Column("agree", "agree"), Column("cells", "cells")),
)

MISSED = Section(
    "elixir_missed",
    "Every cell about which they disagree",
    "",
    ELIXIR,
    (
        text("configuration", "configuration"),
        text("engine", "engine"),
        text("simulated", "here"),
        text("published", "there"),
        Column("device", "device, here"),
        Column("of", "of"),
        text("why", "why"),
    ),
)

CHOICES = Section(
    "elixir_choices",
    "Choices for FSDP2's groups, batch 8",
    "Simulated seconds of a step, in the same simulator, with what FSDP2 really transfers. *Exact*: the MILP over four "
    "states a group, or what it began with; *gap*: how far above its proven bound that is.",
    ELIXIR,
    (
        text("machine", "machine"),
        text("model", "model"),
        Column("ranks", "n"),
        Column("exact", "exact", lambda x: x),
        Column("gap", "gap", f.tenths),
        Column("greedy", "greedy", lambda x: x),
        Column("zero_2", "ZeRO-2", lambda x: x),
        Column("zero_3", "ZeRO-3", lambda x: x),
        Column("zero_2_offload", "ZeRO-2 off.", lambda x: x),
        Column("zero_3_offload", "ZeRO-3 off.", lambda x: x),
    ),
)

PLANS = Section(
    "elixir_plan_b",
    "Sharded plans, batch 8",
    "Simulated seconds of a step for one rank, all judged by the referee of plans, row by row. *Plan*: gathers, "
    "scatters, recomputation, offloads and updates by the CPU decided together, from a trace of the model. The choices "
    "for groups are lowered to plans of the same trace: every layer is computed again in backward, and the CPU updates "
    "beside computing. *Exact* is the fastest of all such choices that this referee has seen: those that the MILP "
    "found for FSDP2, those that it found for the sizes and times of these plans, and what it began with; *greedy* is "
    "Elixir's rule with either. The plan has them as baselines, so that it is never slower. *On FSDP2*: the best "
    "choice as FSDP2 would run it, whose host updates when backward has ended, and which copies float32 masters. Costs "
    "of the trace are scaled to the table of groups, part by part. ‡ planned by an earlier version, in which *exact* "
    "and *greedy* were the choices for FSDP2 alone.",
    PLANNED,
    (
        text("machine", "machine"),
        text("model", "model"),
        Column("ranks", "n"),
        Column("plan", "plan", lambda x: x),
        Column("exact", "exact", lambda x: x),
        Column("greedy", "greedy", lambda x: x),
        Column("zero_2", "ZeRO-2", lambda x: x),
        Column("zero_3", "ZeRO-3", lambda x: x),
        Column("zero_2_offload", "ZeRO-2 off.", lambda x: x),
        Column("zero_3_offload", "ZeRO-3 off.", lambda x: x),
        Column("on_fsdp2", "on FSDP2", lambda x: x),
    ),
)

SPEEDUPS = Section(
    "elixir_speedups",
    "The largest speed-up over the best of DeepSpeed's settings",
    "Where each is largest, with the other one's value for the same configuration. What is missing where the paper has "
    "its 3.4: two GPUs with ZeRO-2 offloaded took 8.4 s there with batch 4 and 8.9 s with batch 8, which computes "
    "nearly twice as long; in the simulator every sequence adds the same time, and batch 4 takes 6.9 s.",
    ELIXIR,
    (
        text("machine", "machine"),
        text("by", "largest in"),
        text("configuration", "configuration"),
        Column("simulated", "simulated", f.ratio),
        Column("published", "published", f.ratio),
    ),
)

SCALING = Section(
    "elixir_ranks",
    "From 1 to 64 GPUs",
    "GPT2-20b, batch 8 for each GPU: simulated TFLOPS for each GPU, and in brackets the most GiB on one, the driver's "
    "included; after `OOM`, what would be needed there, unless it is the host that does not suffice. Above four GPUs "
    "there are several nodes of four, each with its own host, and a network of 25 GB/s for each GPU between them: "
    "assumed, nothing was published. *AWS p4d* has the rates of the paper's Table 5. All but the sharded plans compute "
    "every layer again, and are simulated group by group; the plans are judged row by row. Plans and choices for FSDP2 "
    "take what memory there is; engines of others take what they need.",
    PLANNED,
    (
        text("machine", "machine"),
        Column("ranks", "n"),
        *(Column(k, h, lambda x: x) for k, h in (("plan_b", "sharded plan"), ("fsdp2", "on FSDP2"))),
        *(Column(k, h, lambda x: x) for k, h in (("elixir", "Elixir"), ("ddp", "DDP"), ("fsdp", "FSDP"))),
        *(Column(k, h, lambda x: x) for k, h in (("zero_2", "ZeRO-2"), ("zero_3", "ZeRO-3"))),
        *(Column(k, h, lambda x: x) for k, h in (("zero_2_offload", "ZeRO-2 off."), ("zero_3_offload", "ZeRO-3 off."))),
    ),
)

PLAN_TIME = Section(
    "elixir_plan_time",
    "How long planning takes",
    "The race of the exact choice, the greedy one and the fixed policies, from a table of groups, on one thread; the "
    "solver stops at a gap of 0.1% or after 30 s.",
    ELIXIR,
    (
        text("model", "model"),
        text("machine", "machine"),
        Column("ranks", "n"),
        Column("layers", "layers"),
        Column("seconds", "planned in", f.about_seconds),
        text("winner", "winner"),
        Column("tflops", "TFLOPS", tflops),
        Column("gap", "gap", f.tenths),
    ),
    "elixir_plan_time.png",
)

STEP_TIME = Section(
    "elixir_step_time",
    "How long planning a sharded step takes",
    "Time of the processor, from tracing the model to the plan. *Made by*: how the plan that won was made; *gap*: how "
    "far above the time of computing alone, or of the slowest link alone, the plan's time is. Tests ran on the same "
    "two cores meanwhile.",
    PLANNED,
    (
        text("model", "model"),
        text("machine", "machine"),
        Column("ranks", "n"),
        Column("layers", "layers"),
        Column("seconds", "planned in", f.about_seconds),
        text("winner", "made by"),
        Column("tflops", "TFLOPS", tflops),
        Column("gap", "gap", f.tenths),
    ),
    "elixir_step_time.png",
)

TABLES_OF_GROUPS = (WITHIN, SPEEDUPS, FITS, MISSED, TABLE_7, TABLE_8, TABLE_2, TABLE_3, CHOICES)

PAGE = TablePage(
    "elixir",
    "The Elixir paper's tables, simulated",
    "GPT-2 models with activation checkpointing, FlashAttention, mixed precision and Adam, 1,024 tokens a sequence, on "
    "descriptions of the paper's two machines. **Nothing here ran on a GPU**: a simulator computes time and memory of "
    "a rank, and the paper's numbers stand beside its own. TFLOPS are 8 M D per second. Megatron-LM, which splits "
    "tensors and not groups, is not simulated.",
    (*TABLES_OF_GROUPS, PLANS, SCALING, PLAN_TIME, STEP_TIME, CONSTANTS),
)
