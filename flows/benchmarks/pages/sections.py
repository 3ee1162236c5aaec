"""Lists the measured pages, and describes the tables that each shows."""

from __future__ import annotations

from dataclasses import replace

from stowage.flows.benchmarks.elixir.pages import PAGE as ELIXIR
from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.planning_tables import (
    BIG,
    CHECKS,
    CLUSTER_SIZES,
    DEPTH,
    GROWTH,
    H_ILP,
    NEW_LENGTH,
    OPTIMUM,
    PARTITION,
)
from stowage.flows.benchmarks.pages.ranks_tables import PAGE as SEVERAL_GPUS
from stowage.flows.benchmarks.pages.remat_tables import REMAT_ACCURACY, REMAT_METHODS, REMAT_PEERS, REMAT_SHARES
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, TablePage, text
from stowage.flows.benchmarks.proven.pages import PAGE as PROVEN
from stowage.flows.benchmarks.slimfit.pages import PAGE as SLIMFIT

MAIN_JOB = Section(
    "main_job",
    "",
    "Each contestant is a process of its own; all take turns, step by step, on the same batches, and ratios are "
    "medians over the rounds of one run. Peaks include parameters and optimizer states and come from the allocator's "
    "own events. *Planned in*: the first plan with nothing stored yet, the others with what it has stored; "
    "*recomputed* is the share of the activation bytes that is made more than once; "
    "*same losses* compares every loss with plain PyTorch's, bit for bit. *activation_memory_budget* is PyTorch's own "
    "partitioner at two settings, with the backend of `torch.compile` that runs plain PyTorch's operators if it can.",
    COMMAND,
    (
        text("contestant", "byte-level GPT-2, 12 × 768, batch 4 × 256, AdamW"),
        Column("budget_bytes", "budget", f.mib),
        Column("peak_bytes", "measured peak", f.mib),
        Column("peak_ratio", "of plain PyTorch", f.percent),
        Column("time_ratio", "step time × plain", f.ratio, bold_with="budget_bytes"),
        Column("plan_s", "planned in", f.whole_seconds),
        Column("recomputed_fraction", "recomputed", f.percent),
        Column("losses_equal", "same losses", f.yes_or_no, right=False),
    ),
)

FIRST_MINUTE = Section(
    "first_minute",
    "The first minute: cold and warm",
    "How long `fit` takes from the model to the first step, in a process of its own each time: with nothing stored, "
    "then with what the ones before have stored.",
    f"{COMMAND} first-minute",
    (
        text("what", "the same GPT-2 (85 M parameters), before its first step"),
        Column("processor_s", "processor time", f.about_seconds),
        Column("seconds", "by the clock", f.about_seconds),
    ),
)

FIRST_MINUTE_IN_README = replace(FIRST_MINUTE, columns=(FIRST_MINUTE.columns[0], FIRST_MINUTE.columns[2]))

IN_README = {
    "benchmark": replace(MAIN_JOB, columns=tuple(c for c in MAIN_JOB.columns if c.key != "recomputed_fraction")),
}
"""Mark in README -> the table between the mark's start and end."""

QUARTER = Section(
    "quarter",
    "",
    "Plain PyTorch's smallest memory limit under which it survives is found by bisection, with limits that the kernel "
    "enforces on the whole process; then a plan trains under a quarter of that, weights and states on the disk. With "
    "two cores, copies take time from computing. The plan's process, and not plain PyTorch's, has "
    "`GOMP_SPINCOUNT=1000` in its environment: OpenMP's threads spin less.",
    f"{COMMAND} quarter",
    (text("what", "GPT-2 of 227 M parameters, AdamW"), Column("plain", "plain PyTorch"), Column("plan", "plan")),
)

PAPERS = Section(
    "papers",
    "",
    "The preprint's tasks on descriptions of its machines (12 and 24 GB cards less 2 GB, pinned memory behind them). "
    "*Planned here* is the referee's step time, whole tensors, over the base T_f + T_b + P / α_G, less 1; it is below "
    "0 where the CPU's updates cost less than the GPU's would. *Measured there* is what the authors measured with "
    "their tool. The two columns are not the same kind of number: costs here are estimated from rates, and nothing "
    "here ran on these cards. *Preprint's formulation* has three options per block and offloads a block's activations "
    "whole, in the same search and the same referee.",
    f"{COMMAND} papers",
    (
        text("machine", "machine"),
        text("model", "model, batch × 512, AdamW"),
        text("case", "case"),
        Column("overhead", "planned here", f.tenths),
        Column("published", "measured there", f.tenths),
    ),
)

EXACT = Section(
    "exact",
    "The exact program",
    "O-ILP's program with whole options for the blocks, as planning asks it: each block has all its options, and a "
    "transfer happens within eight steps of the use that it follows or serves. Solved by HiGHS on one thread until the "
    "plan is within a thousandth of its bound, each of its solves for a minute at most. *Step* is "
    "O-ILP's time for fractions of tensors.",
    f"{COMMAND} exact",
    (
        text("machine", "machine"),
        text("model", "model, batch × 512, AdamW"),
        Column("budget_bytes", "budget", f.mib),
        Column("variables", "variables", f.count),
        Column("constraints", "rows", f.count),
        text("status", "status"),
        Column("step_s", "step", f.seconds),
        Column("gap", "within", f.hundredths),
        Column("seconds", "solved in", f.seconds),
    ),
)

HOST = Section(
    "host",
    "",
    "Over a device with nothing to do: every size but layers and heads is as small as can be, on a CPU; processor "
    "time of the launching thread, medians of 9 turns.",
    f"{COMMAND} host",
    (
        text("model", "model"),
        text("plan", "plan"),
        Column("calls", "calls", f.count),
        Column("updates", "calls of the optimizer", f.count),
        Column("plain_s", "plain PyTorch", f.milliseconds),
        Column("step_s", "step", f.milliseconds),
        Column("ratio", "× plain", f.ratio, bold_with="ratio"),
    ),
)

TORTURE = Section(
    "torture",
    "",
    "Every end must be the bits of an undisturbed run, or one sentence and an exit status above zero, with nothing "
    "left behind. What fell was mended, and holds now.",
    "make torture",
    (
        text("kind", "kind"),
        text("what", "what is changed or done"),
        Column("tried", "tried", f.count),
        Column("held", "held at the first try", f.count),
    ),
)

PAGES = (
    TablePage("main_job", "The main job", "", (MAIN_JOB, FIRST_MINUTE)),
    TablePage(
        "planning_time",
        "How long planning takes",
        "",
        (BIG, GROWTH, PARTITION, DEPTH, CLUSTER_SIZES, OPTIMUM, H_ILP, NEW_LENGTH, CHECKS),
    ),
    TablePage(
        "remat",
        "Recomputation in models that are no chain",
        "U-Nets, encoder-decoders, Mixers, scans, … at shares of the *activation budget* that keeping everything "
        "needs (device budget less parameters, states and gradients that stay), at the smallest feasible one and in "
        "whatever the others were measured to take: plain PyTorch, gradient checkpointing, `torch.utils.checkpoint` "
        "every √n layers, and PyTorch's own `activation_memory_budget`. Each point is a process that takes turns with "
        "plain PyTorch; an iteration is forward and backward; loss and all gradients are compared with plain "
        "PyTorch's, bit for bit. All of Stowage's are equal, most of `activation_memory_budget`'s are "
        "not.\n\n`--models`, `--methods`, `--shares`, `--rounds` and `--threads` choose. What an earlier run measured "
        "of other models stays. The models are `unet`, `transformer`, `t5`, `resnet101`, `uno`, `lstm`, `mamba`, "
        "`regnet`, `mixer` and `gpt2`.",
        (REMAT_PEERS, REMAT_SHARES, REMAT_METHODS, REMAT_ACCURACY),
    ),
    PROVEN,
    TablePage("quarter", "A quarter of the memory", "", (QUARTER,)),
    TablePage("papers", "The OffMate preprint's tables, planned", "", (PAPERS, EXACT)),
    ELIXIR,
    SEVERAL_GPUS,
    SLIMFIT,
    TablePage("host", "What a step costs the host", "", (HOST,)),
    TablePage("torture", "What was tried at random", "", (TORTURE,)),
)
