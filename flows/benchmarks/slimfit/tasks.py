"""Defines three tasks: each fine-tunes a small model that was trained on something else before.

`bytes`: the next byte of Python's language reference, after pre-training on the standard library's sources. `digits`:
scikit-learn's handwritten digits, after telling how they were turned. `packages`: from which package of the standard
library a piece of source is, after the same pre-training as `bytes`. A batch depends on seed and iteration alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers.modeling_outputs import SequenceClassifierOutput

from stowage.flows.benchmarks.slimfit import corpora
from stowage.stages.workload.models import build_model
from stowage.stages.workload.randomness import generator, seeded

Batch = dict[str, torch.Tensor]

LAYERS, WIDTH, HEADS, LENGTH = 4, 64, 4, 64
HELD_OUT_WINDOWS = 512
_BYTES = 256

GPT2 = {
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_positions": LENGTH,
    "vocab_size": _BYTES,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
VIT = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


class PieceClassifier(nn.Module):
    """GPT-2, and a layer that tells packages apart by the mean of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = GPT2Model(GPT2Config(**GPT2))
        self.classifier = nn.Linear(WIDTH, len(corpora.PACKAGES))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SequenceClassifierOutput:
        """Classify pieces (batch, length) of source, whose packages are `labels` (batch)."""
        logits = self.classifier(self.transformer(input_ids).last_hidden_state.mean(1))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@dataclass(frozen=True)
class Job:
    """Something that a model is trained on.

    Attributes:
        build: makes the model from a seed, in training mode.
        batch: the batch of a seed and an iteration.
        iterations: how many there are.
        learning_rate: of AdamW, at the first iteration; it falls to 0 in a line.
    """

    build: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    iterations: int
    learning_rate: float


@dataclass(frozen=True)
class Task:
    """A job, what its model was trained on before, and how well it does.

    Attributes:
        name: its name.
        about: what it is, for people.
        before: pre-training; all but the head is taken over.
        job: what is fine-tuned.
        held_out: yields batches that nothing was trained on.
    """

    name: str
    about: str
    before: Job
    job: Job
    held_out: Callable[[], Iterator[Batch]]


def accuracy(task: Task, model: nn.Module) -> float:
    """Return the share of right answers on what was held out, in percent; the model's mode is left as it was."""
    training = model.training
    model.eval()
    right = asked = 0
    with torch.no_grad():
        for batch in task.held_out():
            labels = batch["labels"]
            answers = model(**batch).logits.argmax(-1)
            if answers.dim() == 2:  # a language model: each position answers for the next
                answers, labels = answers[:, :-1], labels[:, 1:]
            right += int((answers == labels).sum())
            asked += labels.numel()
    model.train(training)
    return 100 * right / asked


def _draw(count: int, size: int, *numbers: int) -> torch.Tensor:
    return torch.randint(0, count, (size,), generator=generator(*numbers))


def _language_batch(stream: torch.Tensor, size: int, *numbers: int) -> Batch:
    ids = corpora.windows(stream, _draw(len(stream) - LENGTH, size, *numbers), LENGTH)
    return {"input_ids": ids, "labels": ids}


def _language_model(seed: int) -> nn.Module:
    return build_model("gpt2", GPT2, seed=seed)


_SOURCES = Job(_language_model, lambda seed, i: _language_batch(corpora.sources(), 16, 1, seed, i), 1500, 2e-3)


def _bytes_task() -> Task:
    def held_out() -> Iterator[Batch]:
        rest = corpora.documentation()[1]
        starts = torch.arange(HELD_OUT_WINDOWS) * ((len(rest) - LENGTH) // HELD_OUT_WINDOWS)
        for part in torch.split(starts, 128):
            ids = corpora.windows(rest, part, LENGTH)
            yield {"input_ids": ids, "labels": ids}

    return Task(
        "bytes",
        "next byte of Python's language reference, GPT-2",
        _SOURCES,
        Job(_language_model, lambda seed, i: _language_batch(corpora.documentation()[0], 16, 2, seed, i), 150, 1e-3),
        held_out,
    )


def _pictures(kept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    pictures, labels = corpora.digits()
    border = int(len(pictures) * (1 - corpora.HELD_OUT))
    part = slice(0, border) if kept else slice(border, None)
    return pictures[part], labels[part]


def _turned(seed: int, iteration: int) -> Batch:
    pictures, _ = _pictures(kept=True)
    chosen = pictures[_draw(len(pictures), 64, 3, seed, iteration)]
    turns = _draw(4, 64, 4, seed, iteration)
    turned = torch.stack([torch.rot90(x, int(k), (1, 2)) for x, k in zip(chosen, turns, strict=True)])
    return {"pixel_values": turned, "labels": turns}


def _digits_task() -> Task:
    def batch(seed: int, iteration: int) -> Batch:
        pictures, labels = _pictures(kept=True)
        chosen = _draw(len(pictures), 64, 5, seed, iteration)
        return {"pixel_values": pictures[chosen], "labels": labels[chosen]}

    def held_out() -> Iterator[Batch]:
        pictures, labels = _pictures(kept=False)
        yield {"pixel_values": pictures, "labels": labels}

    return Task(
        "digits",
        "handwritten digits, ViT",
        Job(lambda seed: build_model("vit", VIT | {"num_labels": 4}, seed=seed), _turned, 400, 2e-3),
        Job(lambda seed: build_model("vit", VIT | {"num_labels": 10}, seed=seed), batch, 200, 2e-3),
        held_out,
    )


def _packages_task() -> Task:
    def build(seed: int) -> nn.Module:
        with seeded(seed):
            return PieceClassifier().train()

    def batch(seed: int, iteration: int) -> Batch:
        kept, _ = corpora.packages()
        labels = _draw(len(kept), 16, 8, seed, iteration)
        shares = torch.rand(16, generator=generator(9, seed, iteration)).tolist()
        pieces = []
        for label, share in zip(labels.tolist(), shares, strict=True):
            start = torch.tensor([int(share * (len(kept[label]) - LENGTH))])
            pieces.append(corpora.windows(kept[label], start, LENGTH))
        return {"input_ids": torch.cat(pieces), "labels": labels}

    def held_out() -> Iterator[Batch]:
        for label, rest in enumerate(corpora.packages()[1]):
            starts = torch.arange(HELD_OUT_WINDOWS // 4) * ((len(rest) - LENGTH) // (HELD_OUT_WINDOWS // 4))
            ids = corpora.windows(rest, starts, LENGTH)
            yield {"input_ids": ids, "labels": torch.full((len(ids),), label)}

    return Task(
        "packages",
        "the package that a piece of source is from, GPT-2",
        _SOURCES,
        Job(build, batch, 150, 1e-3),
        held_out,
    )


TASKS: dict[str, Callable[[], Task]] = {"bytes": _bytes_task, "digits": _digits_task, "packages": _packages_task}
"""Makes each task, by its name."""
