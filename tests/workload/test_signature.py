"""Signatures notice what would change a traced step, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stowage.stages.workload.models import build_model
from stowage.stages.workload.signature import BatchSignature, ModelSignature, batch_signature, model_signature
from tests.workload.counted import calls_in


def _batch() -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
        "num_items_in_batch": 100,
        "parts": [torch.ones(2), None],
        "names": ("a", {"deep": 0.5}),
    }


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda batch: batch.__setitem__(key, value)


def test_equal_batches_have_equal_signatures_whatever_their_numbers() -> None:
    one, two = _batch(), _batch()
    two["input_ids"] += 5
    assert batch_signature(one) == batch_signature(two)
    assert batch_signature(one).differences(batch_signature(two)) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_set("num_items_in_batch", 50), "batch['num_items_in_batch'] is 50; the step was traced with 100."),
        (_set("num_items_in_batch", 100.0), "batch['num_items_in_batch'] is 100.0; the step was traced with 100."),
        (_set("num_items_in_batch", True), "batch['num_items_in_batch'] is True; the step was traced with 100."),
        (
            _set("labels", torch.zeros(2, 4, dtype=torch.int64)),
            "batch['labels'] is tensor int64 (2, 4) strides (4, 1) on cpu; "
            "the step was traced with tensor int64 (2, 3) strides (3, 1) on cpu.",
        ),
        (_set("parts", [torch.ones(2), torch.ones(2)]), "batch['parts'][1] is tensor float32 (2,) strides (1,) on cpu; "
         "the step was traced with None."),
        (_set("names", ("a", {"deep": 0.25})), "batch['names'][1]['deep'] is 0.25; the step was traced with 0.5."),
        (_set("names", ["a", {"deep": 0.5}]), "batch['names'] is list 2 entries; "
         "the step was traced with tuple 2 entries."),
        (lambda b: b.pop("labels"), "batch['labels'] is missing; the step was traced with it."),
        (_set("mask", None), "batch['mask'] is new; the step was traced without it."),
        (
            lambda b: b.__setitem__("labels", b["input_ids"]),
            "batch['labels'] is the same tensor as batch['input_ids']; the step was traced with a tensor of its own.",
        ),
    ],
)  # fmt: skip
def test_batch_differences(change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    batch = _batch()
    change(batch)
    assert sentence in batch_signature(_batch()).differences(batch_signature(batch))


def test_numpy_arrays_are_values_and_objects_without_a_value_are_known_by_their_class() -> None:
    one, two = ({"weights": np.array([1.0, last])} for last in (2.0, 3.0))
    assert batch_signature(one).differences(batch_signature(two))
    one, two = ({"thing": object()}, {"thing": object()})
    assert batch_signature(one) == batch_signature(two)
    assert batch_signature(one).differences(batch_signature({"thing": threading.Lock()}))


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return model.train()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m[1].eval(), "module 1 is in evaluation mode; the step was traced in training mode."),
        (lambda m: setattr(m[1], "p", 0.2), "module 1: p is 0.2; the step was traced with 0.1."),
        (lambda m: m[0].weight.requires_grad_(False), "0.weight is float32 (4, 4), not trained; "
         "the step was traced with it float32 (4, 4), trained."),
        (lambda m: m[0].register_forward_hook(print), "module 0 has 1 hooks; the step was traced with 0."),
        (lambda m: m[0].weight.register_hook(print), "module 0 has 1 hooks; the step was traced with 0."),
        (lambda m: setattr(m[3], "weight", m[0].weight), "3.weight is float32 (4, 4), trained, tied to 0.weight; "
         "the step was traced with it float32 (4, 4), trained."),
        (lambda m: m.append(nn.ReLU()), "module 4 is new; the step was traced without it."),
        (lambda m: m.__setitem__(1, nn.Identity()), "module 1 is a Identity; the step was traced with a Dropout."),
        (lambda m: m.to(torch.bfloat16), "0.bias is bfloat16 (4,), trained; "
         "the step was traced with it float32 (4,), trained."),
    ],
)  # fmt: skip
def test_model_differences(change: Callable[[Any], Any], sentence: str) -> None:
    model = _model()
    change(model)
    assert sentence in model_signature(_model()).differences(model_signature(model))


def test_global_switches() -> None:
    model = _model()
    before = model_signature(model)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model_signature(model)
    assert before.differences(inside) == ["autocast on cpu is bfloat16; the step was traced with off."]
    assert before.differences(model_signature(model)) == []


def test_json_round_trip() -> None:
    batch, model = batch_signature(_batch()), model_signature(_model())
    assert BatchSignature.from_json(batch.to_json()) == batch
    assert ModelSignature.from_json(model.to_json()) == model


def test_long_lists_of_differences_are_cut() -> None:
    model = build_model("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}, seed=0)
    before = model_signature(model)
    found = before.differences(model_signature(model.eval()))
    assert len(found) == 9
    assert found[-1].startswith("and ")


def test_quick_enough_for_every_step() -> None:
    overrides = {"n_layer": 12, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = build_model("gpt2", overrides, seed=0)
    before = model_signature(model)
    assert calls_in(lambda: before.differences(model_signature(model))) < 4_000, "about 0.6 ms on a laptop core"


def test_what_is_around_now_and_was_not_is_named() -> None:
    traced = model_signature(nn.Linear(2, 2))
    now = replace(traced, context=(*traced.context, ("loss.scale", "2.0")))
    assert traced.differences(now) == ["loss.scale is 2.0; the step was traced without it."]
    assert now.differences(traced) == ["loss.scale is gone; the step was traced with 2.0."]
