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


@pytest.mark.parametrize("model", ["gpt2", "bert", "vit", "unet", "resnet"])
def test_gradients_are_those_of_hooks(model: str) -> None:
    module, batch, loss = ZOO[model]()
    trace = trace_step(module, batch, loss=loss, optimizer=torch.optim.AdamW(module.parameters()))
    live = StepTensors.of(module, batch)
    torch.manual_seed(1)
    plain_loss, plain = run_trace(trace, live)
    tried = 0
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
        assert any(not torch.equal(found[n], plain[n]) for n in found), f"{kind} changes nothing"
        tried += 1
    assert tried >= 6


def test_kinds_are_described_and_have_a_reference() -> None:
    assert list(KINDS) == list(CODECS)
    assert set(REFERENCE) == {kind for kind, codec in CODECS.items() if not codec.exact}


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
        (codes,) = [s for s in packed.storages if s.name.endswith("_codes") and s.storage >= len(trace.storages)]
        assert codes.nbytes == before * codec.bits / 32, kind
