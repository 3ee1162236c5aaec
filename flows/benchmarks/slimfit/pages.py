"""Describes the page of what may be frozen and kept in codes."""

from __future__ import annotations

from stowage.flows.benchmarks.pages import formats as f
from stowage.flows.benchmarks.pages.table import COMMAND, Column, Section, TablePage, text

SLIMFIT = f"{COMMAND} slimfit"

_POLICIES = {
    "ils": "ILS",
    "ils_paper": "ILS, the paper's units",
    "random": "random",
    "progressive": "progressive",
    "round_robin": "round-robin",
    "prefix": "static prefix",
}

ACCURACY = Section(
    "slimfit_accuracy",
    "Accuracy by policy",
    "Right answers on what was held out, in percent, mean ± standard deviation over seeds. *bytes*: the next byte of "
    "Python's language reference, after pre-training on the standard library's sources (GPT-2, 4 × 64). *packages*: "
    "from which of eight packages of the standard library 64 bytes of source are, after the same pre-training. "
    "*digits*: scikit-learn's digits, after telling how they were turned (ViT, 4 × 64). Each run has 150 to 200 "
    "iterations of AdamW; a seed draws the head, the batches and dropout. Units are those that save memory when they "
    "are frozen together; distances are ‖Δ‖₁/‖w‖₁. *The paper's units*: each parameter of several dimensions by "
    "itself, and the mean of |Δ/w|, its equation (1), at the two highest rates. Progressive freezing begins with none "
    "and ends at the rate after half of the iterations. All of this is plain PyTorch in which what is frozen does not "
    "require gradients: a plan that freezes has the same numbers, bit for bit, which the tests compare.",
    f"{SLIMFIT} --parts accuracy",
    (
        text("task", "task"),
        Column("rate", "frozen", f.percent),
        Column("seeds", "seeds"),
        Column("everything", "all train"),
        *(Column(key, heading) for key, heading in _POLICIES.items()),
    ),
    picture="slimfit_accuracy.png",
)

DIFFERENCES = Section(
    "slimfit_differences",
    "What freezing costs",
    "Points of accuracy lost or won beside training everything with the same seed: mean over tasks and seeds, and its "
    "standard error. A policy is ahead of another where the difference is well beyond both errors. The paper reports "
    "0.2 points lost on average at 80 to 95%, fine-tuning what was trained on far more data. That does not come out "
    "here: ILS is ahead of random, round-robin and the prefix at every rate, and loses 9 to 14 points at 90 and 95%. "
    "*ils_paper* is ILS with the paper's own units and distance: it loses less at 90% on digits, as much at 95%. "
    "Progressive freezing is ahead of it there, and takes the memory of training everything until it has frozen.",
    f"{SLIMFIT} --parts accuracy",
    (
        text("policy", "policy"),
        Column("rate", "frozen", f.percent),
        Column("runs", "runs"),
        Column("difference", "points", lambda x: f"{x:+.2f}"),
        Column("error", "standard error", lambda x: f"{x:.2f}"),
    ),
)

CODES = Section(
    "slimfit_codes",
    "What codes cost",
    "Accuracy on what was held out, in percent, with values for backward in fewer bits and without, the same seeds. "
    "All kinds of codes are allowed, the gradient may change by 1% (the default), and of all choices within this "
    "limit the one is taken that spares most bytes; errors were measured on four batches, once for each task. With "
    "0% frozen everything trains; with 90% ILS chooses what does.",
    f"{SLIMFIT} --parts codes",
    (
        text("task", "task"),
        Column("rate", "frozen", f.percent),
        Column("runs", "runs"),
        Column("exact", "exact", lambda x: f"{x:.2f}"),
        Column("coded", "with codes", lambda x: f"{x:.2f}"),
        Column("difference", "points", lambda x: f"{x:+.2f}"),
        Column("error", "standard error", lambda x: f"{x:.2f}"),
        Column("predicted", "error of the gradient", f.tenths),
    ),
)

SAVED = Section(
    "slimfit_saved",
    "What forward saves, against the share that is frozen",
    "Bytes in memory between forward and backward, beside what is there between steps, with everything kept. *Worst*: "
    "the choice of units under which most is saved, which a plan allows for; *last*: the last units train, as in "
    "fine-tuning of a head. *At the paper's batch* is the measured number times its batch over ours. The paper "
    "(table 3) has 3.2 GB for BERT-base on 128 tokens and 4.5 GB for ViT-base on 224 pixels, both at batch 32; "
    "0.5 to 0.7 GB and 0.8 to 1.0 GB with the freezing that it chose, 80 to 95%, and its codes, without which the "
    "rows here are (a table below has both). Its 69.5 and 11.9 GB are of ViT-base on 384 pixels at batch 128, with "
    "attention that saves its matrix of probabilities; here one picture is measured, and times 128 that is the figure.",
    f"{SLIMFIT} --parts saved",
    (
        text("model", "model"),
        Column("batch", "batch"),
        text("units", "units"),
        Column("rate", "frozen", f.percent),
        text("mask", "which train"),
        Column("predicted_bytes", "predicted", f.mib),
        Column("measured_bytes", "measured", f.mib),
        Column("scaled_gb", "at the paper's batch", lambda x: f"{x:.1f} GB" if x else "–"),
    ),
)

CHOSEN = Section(
    "slimfit_chosen",
    "What forward saves under the units that ILS chooses",
    "The same bytes in a short run of ILS, each step with the units that it chose, by AdamW on drawn tokens: *mean* "
    "and *most* over the steps, beside what is predicted of the worst choice of as many units, which a plan allows "
    "for, and of the last units. Units begin with random numbers, and are chosen by how far they moved once they have "
    "trained. *Off*: the largest difference of measured and predicted bytes of one step.",
    f"{SLIMFIT} --parts chosen",
    (
        text("model", "model"),
        Column("rate", "frozen", f.percent),
        Column("iterations", "steps"),
        Column("predicted_mean_bytes", "mean, predicted", f.mib),
        Column("measured_mean_bytes", "mean, measured", f.mib),
        Column("predicted_most_bytes", "most, predicted", f.mib),
        Column("measured_most_bytes", "most, measured", f.mib),
        Column("off", "off", f.tenths),
        Column("worst_bytes", "worst", f.mib),
        Column("last_bytes", "last", f.mib),
    ),
)

CODED = Section(
    "slimfit_coded",
    "What forward saves with freezing and codes together",
    "The same bytes, with nine tenths of the units frozen, with what backward reads in codes, and with both: SlimFit "
    "whole. The paper's kinds of codes are allowed, and int8 and int4 with a scale. *May change by*: the limit of the "
    "gradient's error, the default and one that forbids hardly anything, since the paper has none; measured on four "
    "samples of drawn tokens or pixels, and with freezing for the units of which it is largest. Of ViT on 384 "
    "pixels, whose backward takes long, 8-bit kinds and the largest tenth are tried, on one picture. Of the choices "
    "within the limit the one is taken under which the worst choice of units saves least. *Worst* and *last* are as "
    "above; *ILS* is the mean of 24 steps with the units that it chose. *Paper*: its figure for the same model without "
    "and with SlimFit; with it, one of those that it has for the freezing rates that it chose, 80 to 95%, on real "
    "data, with the units that ILS chose there. A worst choice of units saves more than that: units all over the "
    "model train, so that backward goes through all of it, and one of those that share an input is enough to keep it. "
    "Within 1%, fewer values may be in codes with freezing than without: the gradient of a few units changes by more "
    "than that of all.",
    f"{SLIMFIT} --parts coded",
    (
        text("model", "model"),
        Column("batch", "batch"),
        text("techniques", "with"),
        Column("rate", "frozen", f.percent),
        Column("limit", "may change by", lambda x: f.percent(x) if x else "–", optional=True),
        text("mask", "which train"),
        Column("predicted_bytes", "predicted", f.mib),
        Column("measured_bytes", "measured", f.mib),
        Column("scaled_gb", "at the paper's batch", lambda x: f"{x:.1f} GB" if x else "–"),
        Column("paper_gb", "paper", lambda x: f"{x:.1f} GB" if x else "–"),
        Column("error", "predicted error", lambda x: f.tenths(x) if x else "–"),
        text("kept", "kept in codes"),
    ),
)

STATIC = Section(
    "slimfit_static",
    "What freezing does not spare",
    "What the worst choice of units saves between forward and backward, by the operators of backward that read it: "
    "the sums are those of the table above. What does not fall with the share that is frozen is static, in the "
    "paper's word (section 5): the inputs and outputs of activation functions, attention, dropout and "
    "normalisations are read on the way to a unit before them, whatever of these is frozen. Of matrix products with "
    "weights the inputs alone are saved, and go with their units. A layer normalisation that is frozen computes no "
    "gradients of weight and bias, and still reads its input; it is semi-static, in the paper's word, with codes "
    "alone: the last row of a model is its normalisations once more, of which those that do not train keep a tenth of "
    "the values with their places, and those that train keep everything beside these codes. The decoder has no such "
    "row: it normalises by the root mean square, in products of elements whose backward reads the values themselves "
    "on the way to units before them, and top10 codes are of layer normalisations.",
    f"{SLIMFIT} --parts static",
    (
        text("model", "model"),
        text("reader", "read by"),
        *(Column(f"at_{rate:.0%}", f"{rate:.0%} frozen", f.mib) for rate in (0.0, 0.5, 0.9, 0.95)),
    ),
)

LOSSY = Section(
    "slimfit_lossy",
    "Plans with and without leave",
    "One step at shares of the activation budget: the exact plan, the one *with leave*, which may keep values in fewer "
    "bits as far as the gradient changes by 1% at most, and *freezing too*, which besides trains a tenth of the units "
    "in each step, others in each. All run in turns, with an update by SGD; times are the medians, with freezing the "
    "mean over the masks, and peaks then are of the worst one. *Same program*: nothing is kept in fewer bits, and it "
    "is the exact plan, row for row. "
    "*Predicted error* is what the choice counted with, from four batches; *error* is what the gradient of another "
    "batch changes by, over the root mean square of the norms of those four's (U-Net has one batch). Codes are taken "
    "where they cost less than computing again, which on this machine they do at 15% of ViT alone. With updates in "
    "backward U-Net needs 29.8 MiB at least, which is more than 30%; a run of the command adds rows at the least "
    "budget of such a model, which these data do not have yet.",
    f"{SLIMFIT} --parts lossy",
    (
        text("model", "model"),
        Column("share", "activations", f.percent),
        text("leave", "plan"),
        Column("predicted_peak_bytes", "predicted peak", f.mib),
        Column("peak_bytes", "measured peak", f.mib),
        Column("predicted_time_s", "predicted", f.milliseconds),
        Column("time_s", "step", f.milliseconds),
        Column("speedup", "times as fast", lambda x: f"{x:.2f}", optional=True),
        Column("same", "", lambda x: "same program" if x else "", optional=True),
        Column("predicted_error", "predicted error", f.tenths),
        Column("error", "error", f.tenths),
        text("kept", "kept in fewer bits"),
    ),
)

PAIRS = Section(
    "slimfit_pairs",
    "In pairs, and all at once",
    "The paper's tables 10 to 12, with more techniques, each combination in one plan: GPT-2 (4 × 192), 8 samples of "
    "128 tokens for each update by AdamW. *freeze*: three quarters of the units, others in each update. *quantise*: "
    "codes of 4 to 16 bits, within the default limit of the gradient's error. *prune*: the largest tenth of what "
    "normalisations read that do not train; only LoRA and freezing have such, and the error may be 50%. *LoRA*: "
    "adapters of rank 16. *accumulate*: four micro-batches. These take the least memory that they can with nothing "
    "computed again; with *recompute* the step has half of that beside what is there between steps, and with "
    "*offload* half of what is there between steps goes to the disk, or both as far as there is a plan; *CPU updates* "
    "is the same with RAM in the place of a GPU's host memory, and updates there. *shard*: two ranks with gloo, which "
    "share the two cores, each with 8 samples of its own; the rank that takes most is told, and its updates are timed "
    "beside DistributedDataParallel's. What each plan really does is told: *computed again*, in an update; most that "
    "is *offloaded*; parameters *updated by the CPU*; and how many tensors are *in codes*. A technique that may be "
    "used need not be: where computing again is faster than codes, it is what the plan does. Peaks are those with the "
    "most demanding units training. Updates are timed in turns with plain PyTorch's, all samples at once; medians. "
    "*Paper*: memory and seconds an epoch of GPT-2 on WikiText-2, where SlimFit is what freezes, quantises and prunes. "
    "That ranks train the same numbers with codes, and with freezing, as DistributedDataParallel does with these, is "
    "tested by `tests/sharding/test_codes_on_ranks.py` and `tests/sharding/test_freezing_on_ranks.py`.",
    f"{SLIMFIT} --parts pairs",
    (
        Column("techniques", "techniques", lambda x: x or "plain training"),
        Column("predicted_peak_bytes", "predicted peak", f.mib),
        Column("peak_bytes", "measured peak", f.mib),
        Column("predicted_time_s", "predicted", f.milliseconds),
        Column("ratio", "update ÷ plain PyTorch's", lambda x: f"{x:.2f}", optional=True),
        Column("recomputed_bytes", "computed again", f.mib),
        Column("offloaded_bytes", "offloaded", f.mib),
        Column("updated_bytes", "updated by the CPU", f.mib),
        Column("coded", "in codes", str),
        text("paper", "paper"),
        Column("error", "predicted error", lambda x: f.tenths(x) if x else "–"),
        text("kept", "kept in fewer bits"),
    ),
)

PAGE = TablePage(
    "slimfit",
    "What may be frozen and kept in codes",
    "SlimFit's claims, tried on tasks that are on every machine, and what its ideas are worth as choices of one plan.",
    (ACCURACY, DIFFERENCES, CODES, SAVED, CHOSEN, STATIC, CODED, LOSSY, PAIRS),
)
