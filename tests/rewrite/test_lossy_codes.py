"""Values kept in codes: gradients equal, bit for bit, those of plain PyTorch with the same codes in its hooks."""

from __future__ import annotations

import pytest
import torch

from stowage.stages.ir.lossy import KINDS
from stowage.stages.rewrite import REWRITES, rewritten
from stowage.stages.rewrite.lossy import CODECS
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.sensitivity import StepTensors, run_trace
from stowage.stages.trace import trace_step
from tests.rewrite.packed_by_hooks import REFERENCE, Chosen, hooked
from tests.zoo import ZOO


@pytest.fixture(autouse=True)
def _small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)


OWN = {
    "gpt2": {"fixed8_unit"},
    "gpt2_frozen": {"fixed8_unit", "top10"},
    "bert": {"fixed8_unit", "gelu2bit"},
    "vit": {"fixed8_unit", "gelu2bit"},
    "unet": {"relu1bit", "silu2bit"},
    "resnet": {"relu1bit"},
}
"""The models, and of the kinds that are not for any value those for which each has some."""

GENERAL = set(KINDS).difference(*OWN.values())
"""The kinds for which each model has values."""


@pytest.mark.parametrize("model", list(OWN))
def test_gradients_are_those_of_hooks(model: str) -> None:
    module, batch, loss = ZOO[model]()
    trace = trace_step(module, batch, loss=loss, optimizer=torch.optim.AdamW(module.parameters()))
    live = StepTensors.of(module, batch)
    torch.manual_seed(1)
    plain_loss, plain = run_trace(trace, live)
    tried = set[str]()
    for kind in KINDS:
        packed = REWRITES[kind].everywhere(trace)
        if packed is trace:
            continue
        torch.manual_seed(1)
        found_loss, found = run_trace(packed, live)
        assert torch.equal(found_loss, plain_loss), "forward reads what it always read"
        chosen = Chosen.of(trace, kind)
        reference, _, _ = ZOO[model]()
        torch.manual_seed(1)
        with hooked(chosen) as mode:
            outputs = reference(**batch)
            value = outputs.loss if loss is None else loss(outputs, batch)
            value.backward()
        assert mode.used == set(chosen.packed)
        assert torch.equal(value, found_loss)
        different = [
            n for n, p in reference.named_parameters() if p.grad is not None and not torch.equal(p.grad, found[n])
        ]
        assert different == [], kind
        same = all(torch.equal(found[n], plain[n]) for n in found)
        assert same == CODECS[kind].exact, kind
        tried.add(kind)
    assert tried == GENERAL | OWN[model]


def test_kinds_are_described_and_have_a_reference() -> None:
    assert list(KINDS) == list(dict.fromkeys(codec.kind for codec in CODECS.values()))
    assert set(REFERENCE) == set(KINDS)


def test_codes_take_the_bytes_that_their_bits_say() -> None:
    module, batch, _ = ZOO["gpt2"]()
    trace = trace_step(module, batch, optimizer=torch.optim.AdamW(module.parameters()))
    for kind, codec in CODECS.items():
        sites = REWRITES[kind].sites(trace)
        if not sites:
            continue
        packed = rewritten(trace, f"{kind}[0]")
        maker = trace.calls[sites[0]]
        before = trace.storages[trace.values[maker.returns[0]].storage].nbytes
        new = packed.storages[len(trace.storages) :]
        found = sum(s.nbytes for s in new if s.name.endswith(("_codes", f"{kind}_indices")))
        wanted = before * codec.bits / 32
        assert found == (wanted if codec.kind != "top10" else wanted - wanted % 8), kind  # whole pairs


class Sums(torch.nn.Module):
    """What each activation function returns is only added to something: its backward alone reads what was saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            function = (torch.nn.functional.relu, torch.nn.functional.silu, torch.nn.functional.gelu)[i % 3]
            x = x + function(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("kind", ["relu1bit", "silu2bit", "gelu2bit"])
def test_one_or_two_bits_of_an_activation_function(kind: str) -> None:
    batch = torch.linspace(-3, 3, 32 * 16).reshape(32, 16)
    module, reference = Sums(), Sums()
    trace = trace_step(module, (batch,), loss=lambda value, _: value)
    _, plain = run_trace(trace, StepTensors.of(module, (batch,)))
    packed = REWRITES[kind].everywhere(trace)
    assert len(REWRITES[kind].sites(trace)) == (2 if kind == "relu1bit" else 1)
    _, found = run_trace(packed, StepTensors.of(module, (batch,)))
    with hooked(Chosen.of(trace, kind)):
        reference(batch).backward()
    assert all(torch.equal(p.grad, found[n]) for n, p in reference.named_parameters() if p.grad is not None)
    assert all(torch.equal(found[n], plain[n]) for n in found) == (kind == "relu1bit")
    (codes,) = [s for s in rewritten(trace, f"{kind}[0]").storages if s.name.endswith("_codes")]
    assert codes.nbytes == 32 * 16 * CODECS[kind].bits / 8


def test_fused_attention_is_computed_again_of_what_is_packed() -> None:
    """With the log-sum-exp of other q, k and v, gradients would be wrong by more than they are."""
    batch = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().mean()

    module, reference = Attention(), Attention()
    trace = trace_step(module, (batch,), loss=lambda value, _: value)
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert any(c.target.startswith(attention) for c in trace.calls)
    for kind in ("bf16", "int8_tensor"):
        packed = REWRITES[kind].everywhere(trace)
        again = [c for c in packed.calls if c.target == f"{attention}.default" and c.phase == "backward"]
        assert len(again) == 1
        _, found = run_trace(packed, StepTensors.of(module, (batch,)))
        with hooked(Chosen.of(trace, kind)):
            value = reference(batch)
            value.backward()
        assert all(torch.equal(p.grad, found[n]) for n, p in reference.named_parameters() if p.grad is not None)
        reference.zero_grad()
