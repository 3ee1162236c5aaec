"""q, k and v of fused attention are packed only where attention is computed again of what is unpacked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from stowage.stages.ir.trace import Call, TraceTables
from stowage.stages.rewrite.lossy import CODECS, compress, compressed_sites
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.rewrite.lossy.again import ATTENTION, draws
from stowage.stages.rewrite.lossy.saved import Saved, saved_values
from stowage.stages.sensitivity import StepTensors, gradient_error
from stowage.stages.trace import trace_step
from tests.cards.attention import KINDS, as_on_a_card, aten

WIDTH, HEADS = 64, 2


class Attention(nn.Module):
    """Fused attention with dropout inside, of q, k and v that are one tensor or three."""

    def __init__(self, dropout: float = 0.0, *, together: bool = False, sharpness: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout, self.sharpness = dropout, sharpness
        sizes = [3 * WIDTH] if together else [WIDTH] * 3
        self.layers = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [part for layer in self.layers for part in layer(self.sharpness * x).split(WIDTH, -1)]
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in made)
        found = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(0))


def traced(module: nn.Module, x: torch.Tensor) -> TraceTables:
    return trace_step(module, (x,), loss=lambda value, _: value)


def attentions(trace: TraceTables) -> list[Call]:
    return [c for c in trace.calls if c.target.startswith(ATTENTION) and c.phase == "forward"]


def heads(trace: TraceTables) -> set[int]:
    """The storages of q, k and v."""
    return {trace.values[v].storage for call in attentions(trace) for v in call.reads[:3]}


def packed(trace: TraceTables, kind: str) -> Sequence[Saved]:
    """What a kind packs of q, k and v."""
    own = heads(trace)
    return [s for s in compressed_sites(trace, CODECS[kind]) if own.intersection(part.storage for part in s.parts)]


@pytest.mark.parametrize("operator", [*ATTENTION, "aten._scaled_dot_product_flash_attention_for_cpu"])
def test_the_probability_of_dropout_is_read_where_the_schema_has_it(operator: str) -> None:
    """By position, by name, and where it is left out, which is without dropout."""
    schema = getattr(aten, operator.removeprefix("aten.")).default._schema
    names = [argument.name for argument in schema.arguments]
    position = names.index("dropout_p")
    call = Call(0, f"{operator}.default", "", (), (), False, (), False, True, "", "forward", "", "", "")

    def says(args: Sequence[object], **kwargs: float) -> bool:
        return draws(replace(call, arguments=json.dumps({"args": args, "kwargs": kwargs})))

    for probability in (0.0, 0.25):
        args = [{"value": 0}] * 3 + [None] * (position - 3) + [probability, True]
        assert says(args) == (probability > 0)
        assert says(args[:3], dropout_p=probability) == (probability > 0)
    assert not says(args[:3])


@pytest.mark.parametrize("together", [True, False], ids=["one tensor", "three tensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_attention_is_packed_where_dropout_draws_inside(kind: str, together: bool) -> None:
    """Its masks come from a seed that computing it again would not have; without dropout all three are packed."""
    sites: dict[float, Sequence[Saved]] = {}
    for dropout in (0.0, 0.1):
        module, x = Attention(dropout, together=together), batch()
        if kind != "efficient":  # the others take half precision alone
            module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
        with as_on_a_card(kind):
            trace = traced(module, x)
        (attention,) = attentions(trace)
        assert kind in attention.target
        sites[dropout] = packed(trace, "int8_tensor")
        again = {call for saved in saved_values(trace) for call in saved.again}
        assert (attention.call in again) == (dropout == 0)
    assert sites[0.1] == []
    (saved,) = sites[0.0]
    assert len(saved.parts) == (1 if together else 3)


@pytest.mark.parametrize("kind", ["int4_tensor", "int4_group"])
def test_the_sums_of_other_q_k_and_v_would_make_gradients_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward divides by the sum of exponentials that forward has saved: of codes it may be too small by any factor.

    Scores are large, as those of trained models are.
    """
    module, x = Attention(sharpness=4.0), batch()
    trace, live = traced(module, x), [StepTensors.of(module, (x,))]
    own = heads(trace)

    def made(call: Call) -> bool:
        return not own.isdisjoint(trace.values[v].storage for v in call.returns if v >= 0)

    computed_again = gradient_error(trace, compress(CODECS[kind], trace, made), live)
    monkeypatch.setattr(saved_module, "ATTENTION", ("no operator",))
    mixed = compress(CODECS[kind], trace, made)
    assert len([c for c in mixed.calls if c.target.startswith(ATTENTION)]) == 2, "it is not computed again"
    assert 0 < computed_again < 1 < gradient_error(trace, mixed, live)
