"""The tables of a step: complete, deterministic, true about who makes, aliases and changes what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stowage.stages.ir.errors import TableError
from stowage.stages.ir.table import write_rows
from stowage.stages.ir.trace import Call, TraceTables, Value
from stowage.stages.ir.updates import UPDATE, updated_parameter
from stowage.stages.trace import trace_step
from tests.matrix import some
from tests.solve.prepared import prepared_zoo
from tests.zoo import ZOO


def mean(outputs: Any, batch: Any) -> torch.Tensor:
    del batch
    result: torch.Tensor = outputs.float().mean()
    return result


def trace(model: nn.Module, *inputs: torch.Tensor, **more: Any) -> TraceTables:
    return trace_step(model, inputs, **{"loss": mean, **more})


def calls(found: TraceTables, text: str, phase: str = "") -> list[Call]:
    return [c for c in found.calls if text in c.target and phase in c.phase]


@pytest.mark.parametrize("name", some(["gpt2_mask", "resnet", "tied"], keep=["gpt2_mask", "tied"]))
def test_two_traces_are_equal(name: str) -> None:
    first, second = (trace_step(*ZOO[name]()[:2], loss=ZOO[name]()[2], notices=[]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "lstm", "gpt2_frozen"])
def test_tables_are_whole(name: str) -> None:
    found = prepared_zoo(name).trace
    found.check()
    assert len({v.name for v in found.values}) == len(found.values)
    assert all(v.name.isidentifier() for v in found.values)
    made = {v for c in found.calls for v in c.returns if v >= 0}
    persistent = {v.value for v in found.values if v.call < 0}
    assert made | persistent == set(range(len(found.values)))
    assert not made & persistent
    for value in found.values:
        if value.call >= 0:
            assert found.calls[value.call].returns[value.output] == value.value
        role = found.storages[value.storage].role
        assert (value.call < 0) <= (role != "temporary")
    phases = [c.phase for c in found.calls]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert {c.parameter for c in found.gradients} == {updated_parameter(c.arguments)[0] for c in calls(found, UPDATE)}


def test_tables_come_back_from_disk_and_mixed_ones_are_refused(tmp_path: Path) -> None:
    found, other = prepared_zoo("tied").trace, prepared_zoo("y_sum").trace
    found.save(tmp_path)
    assert TraceTables.load(tmp_path) == found
    write_rows(tmp_path / "values.parquet", Value, other.values)
    with pytest.raises(TableError, match=r"dvc repro"):
        TraceTables.load(tmp_path)
    write_rows(tmp_path / "values.parquet", Value, found.values[1:])
    with pytest.raises(TableError, match=f"{tmp_path}.*do not belong together"):
        TraceTables.load(tmp_path)


def test_a_value_is_made_before_it_is_read() -> None:
    found = prepared_zoo("tied").trace
    early = replace(found.calls[0], reads=(found.calls[5].returns[0],))
    with pytest.raises(TableError, match=r"call 0 reads value \d+ before it exists"):
        replace(found, calls=[early, *found.calls[1:]]).check()


def test_an_in_place_call_writes_the_storage_it_was_given() -> None:
    found = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(2, 4))
    (relu,) = calls(found, "aten.relu_")
    (linear,) = calls(found, "aten.addmm")
    made = found.values[linear.returns[0]].storage
    assert relu.mutates == (made,)
    assert found.values[relu.returns[0]].storage == made
    assert not relu.is_view
    assert found.storages[made].role == "temporary"


def test_dropout_is_a_random_call_on_memory_of_its_own() -> None:
    found = trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4))
    (draw,) = calls(found, "bernoulli_")
    assert draw.is_random
    mask = found.values[draw.reads[0]]
    assert draw.mutates == (mask.storage,)
    made = found.calls[mask.call]
    assert made.target == "aten.empty_strided.default", "the mask does not keep the input in memory"
    assert made.reads == ()
    assert sum(c.is_random for c in found.calls) == 1


def test_batch_statistics_are_changed_by_the_forward_call_and_not_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    found = trace(model, torch.randn(2, 3, 8, 8))
    names = {s.storage: s.name for s in found.storages}
    (norm,) = calls(found, "native_batch_norm.default", "forward")
    assert {names[s] for s in norm.mutates} == {"1.running_mean", "1.running_var"}
    assert norm.replay_arguments
    assert norm.replay_arguments != norm.arguments
    values = {names[v.storage]: v.value for v in found.values if v.call < 0}
    assert f'{{"value":{values["1.running_mean"]}}}' in norm.arguments
    assert f'{{"value":{values["1.running_mean"]}}}' not in norm.replay_arguments
    (count,) = [c for c in found.calls if "1.num_batches_tracked" in {names[s] for s in c.mutates}]
    assert count.target.startswith("aten.add_")
    assert not count.replay_arguments


def test_batch_norm_in_evaluation_changes_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval())
    found = trace(model, torch.randn(2, 3, 8, 8))
    buffers = {s.storage for s in found.storages if s.role == "buffer"}
    assert not any(buffers & set(c.mutates) for c in found.calls)
    assert not any(c.replay_arguments for c in found.calls)


def test_views_share_their_storage() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layer(x)
            return y.view(2, 2, 4).transpose(0, 1)[1:].unsqueeze(0) * 2

    found = trace(Views(), torch.randn(4, 4))
    (linear,) = calls(found, "addmm")
    storage = found.values[linear.returns[0]].storage
    views = [c for c in found.calls if c.is_view and found.values[c.returns[0]].storage == storage]
    assert [c.target.split(".")[1] for c in views if c.phase == "forward"] == [
        "view",
        "transpose",
        "slice",
        "unsqueeze",
    ]
    last = found.values[views[-1].returns[0]]
    assert (last.shape, last.offset) == ((1, 1, 2, 4), 4)
    assert all(not c.mutates for c in views)


def test_parameters_that_share_memory_share_a_storage() -> None:
    found = prepared_zoo("gpt2").trace
    names = [s.name for s in found.storages if s.role == "parameter"]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names, "tied"

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(8, 4)
            self.one, self.two = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.one @ self.two

    halves = trace(Halves(), torch.randn(2, 4))
    one, two = (v for v in halves.values if v.source.startswith("parameter:"))
    assert one.storage == two.storage
    assert (one.source, two.source) == ("parameter:one", "parameter:two")
    assert (one.offset, two.offset) == (0, 16)


def test_what_nothing_needs_is_dropped() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layer(x)
            torch.sin(self.unused(x))
            torch.rand(3)
            return y

    found = trace(Wasteful(), torch.randn(2, 4), optimizer=None)
    assert not calls(found, "aten.sin")
    assert len(calls(found, "addmm")) == 1
    assert len(calls(found, "aten.rand.")) == 1, "eager draws these numbers too"
    without = {g.parameter for g in found.gradients if g.gradient_value < 0}
    assert without == {"unused.weight", "unused.bias"}


def test_a_mask_that_every_layer_builds_is_built_once() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> Any:
            for layer in self.layers:
                mask = (1.0 - keep.float()) * -100.0
                x = layer(x) + mask.unsqueeze(1)
            return x

    found = trace(Masked(), torch.randn(4, 4), torch.ones(4, dtype=torch.int64))
    assert len(calls(found, "aten.mul", "forward")) == 1
    assert len([c for c in found.calls if c.phase == "forward" and "_to_copy" in c.target]) == 1
    # Not when something is drawn or depends on a parameter.
    assert len(calls(found, "addmm", "forward")) == 3


def test_equal_calls_on_changed_memory_are_not_merged() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))
            self.count: torch.Tensor

        def forward(self, x: torch.Tensor) -> Any:
            before = torch.exp(self.count)
            self.count += 1
            after = torch.exp(self.count)
            return self.layer(x) * before * after

    found = trace(Running(), torch.randn(2, 4))
    assert len(calls(found, "aten.exp.")) == 2


def test_calls_with_equal_arguments_around_a_change_are_not_merged() -> None:
    """`detach` leaves no call, so that nothing tells these two apart."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))
            self.count: torch.Tensor

        def forward(self, x: torch.Tensor) -> Any:
            same = self.count.detach()
            before = torch.exp(same)
            self.count += 1
            return self.layer(x) * before * torch.exp(same)

    found = trace(Detached(), torch.randn(2, 4))
    first, second = calls(found, "aten.exp.")
    assert first.arguments == second.arguments


def test_random_calls_are_not_merged() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x) + torch.rand(4) + torch.rand(4)

    found = trace(Noise(), torch.randn(2, 4))
    assert len(calls(found, "aten.rand.")) == 2


def test_random_state_weights_buffers_and_gradients_are_left_alone() -> None:
    model, batch, loss = ZOO["resnet"]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_step(model, batch, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training


def test_gradient_checkpointing_is_switched_off_with_a_notice_and_restored() -> None:
    model, batch, _ = ZOO["gpt2"]()
    plain = trace_step(model, batch)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    switches = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    assert switches
    notices: list[str] = []
    assert trace_step(model, batch, notices=notices) == plain
    (notice,) = notices
    assert "gradient checkpointing" in notice
    assert "the plan replaces it" in notice
    assert all(m.gradient_checkpointing for m in switches)
    with pytest.raises(Exception, match="must be one number"):
        trace_step(model, batch, loss=lambda outputs, _: outputs.logits)
    assert all(m.gradient_checkpointing for m in switches), "restored after a failure too"


def test_constants_keep_their_bytes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x) * torch.tensor([1.0, 2.0, 3.0])

    found = trace(Scaled(), torch.randn(2, 3))
    (constant,) = found.constants
    assert torch.frombuffer(bytearray(constant.content), dtype=torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert found.storages[found.values[constant.value].storage].role == "constant"


def test_calls_know_their_module_and_line() -> None:
    found = prepared_zoo("resnet").trace
    convolutions = calls(found, "aten.convolution.default", "forward")
    assert [c.module for c in convolutions][:3] == ["stem.0", "layers.0.conv1", "layers.0.conv2"]
    paths = {c.module for c in found.calls if c.phase == "forward"}
    backward = [c for c in found.calls if c.phase == "backward" and c.module]
    assert len(backward) > len(convolutions)
    assert {c.module for c in backward} <= paths
    assert all(c.location.startswith("tests/zoo.py:") for c in convolutions)


def test_the_configuration_is_told_apart() -> None:
    x = torch.randn(2, 4)

    def configuration(model: nn.Module, batch: torch.Tensor = x, **more: Any) -> str:
        return trace(model, batch, **more).meta.configuration_hash

    model = nn.Linear(4, 4)
    adamw = torch.optim.AdamW
    plain = configuration(model)
    found = {
        plain,
        configuration(nn.Linear(4, 5)),
        configuration(model, torch.randn(3, 4)),
        configuration(model, loss=lambda outputs, _: (outputs**2).mean()),
        configuration(model, optimizer=adamw(model.parameters())),
        configuration(model, optimizer=torch.optim.SGD(model.parameters(), lr=1)),
        configuration(model, optimizer=adamw(model.parameters(), weight_decay=0.5)),
        configuration(nn.Linear(4, 4).double(), x.double()),
    }
    assert len(found) == 8
    rate = [configuration(model, optimizer=adamw(model.parameters(), lr=lr)) for lr in (1e-3, 1e-2)]
    assert rate[0] == rate[1], "a plan does not depend on the learning rate"
    assert configuration(nn.Linear(4, 4)) == plain, "nor on the weights"


def test_states_are_those_of_the_optimizer() -> None:
    model = nn.Linear(4, 8)
    found = trace(model, torch.randn(2, 4), optimizer=torch.optim.AdamW(model.parameters()))
    states = {s.name: s.nbytes for s in found.storages if s.role == "state"}
    assert states == {
        "weight::step": 4, "weight::exp_avg": 128, "weight::exp_avg_sq": 128,
        "bias::step": 4, "bias::exp_avg": 32, "bias::exp_avg_sq": 32,
    }  # fmt: skip
    updates = calls(found, UPDATE)
    assert {updated_parameter(c.arguments)[0] for c in updates} == {"weight", "bias"}
    assert all(len(c.mutates) == 4 for c in updates)
    assert len({c.signature for c in updates}) == 2


def test_a_parameter_that_the_optimizer_lacks_keeps_its_gradient() -> None:
    model = nn.Linear(4, 8)
    found = trace(model, torch.randn(2, 4), optimizer=torch.optim.AdamW([model.weight]))
    assert [updated_parameter(c.arguments)[0] for c in calls(found, UPDATE)] == ["weight"]
    assert {g.parameter for g in found.gradients if g.gradient_value >= 0} == {"weight", "bias"}


def test_fake_weights_give_the_trace_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.ReLU())

    real = trace(build(), torch.zeros(2, 3, dtype=torch.int64))
    with FakeTensorMode():
        assert trace(build(), torch.zeros(2, 3, dtype=torch.int64)) == real


def test_losses_of_a_function_of_outputs_and_batch() -> None:
    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch["target"])

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
            return self.layer(x)

    batch = {"x": torch.randn(2, 4), "target": torch.tensor([1, 2])}
    found = trace_step(Keywords(), batch, loss=loss)
    assert [s.name for s in found.storages if s.role == "input"] == ["x", "target"]
    assert found.values[found.meta.loss_value].shape == ()


def test_backward_calls_know_their_function_and_forward_calls_that_of_their_backward() -> None:
    """What one function reads and makes stays in eager mode until it returns, as the power of a cube does here."""

    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.abs().amax()  # without a backward function: no other call's number
            return self.last(self.first(x / scale) ** 3)

    found = trace(Cube(), torch.randn(2, 4))
    (cube,) = calls(found, "aten.pow", "forward")
    (power,) = calls(found, "aten.pow", "backward")
    of_cube = [c for c in found.calls if c.phase == "backward" and c.function == cube.function]
    assert power in of_cube
    assert [c.target for c in of_cube] == ["aten.pow.Tensor_Scalar", "aten.mul.Scalar", "aten.mul.Tensor"]
    functions = [c.function for c in found.calls if c.phase == "backward" and c.function >= 0]
    assert functions == sorted(functions)
    assert sorted(set(functions)) == list(range(len(set(functions))))
    assert {c.function for c in calls(found, "aten.amax")} == {-1}
    by_module = {c.module: c.function for c in calls(found, "aten.addmm", "forward")}
    made = {v: c.function for c in found.calls for v in c.returns}
    gradients = {g.parameter: made[g.gradient_value] for g in found.gradients}
    assert gradients["last.bias"] == by_module["last"]
    assert gradients["first.bias"] == by_module["first"]


def test_hooks_of_parameters_are_no_function_of_their_own() -> None:
    """PyTorch gives all functions that end at a parameter the same number: they do not end together."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    found = trace(model, torch.randn(2, 4))
    doubled = calls(found, "aten.mul", "backward")
    assert len(doubled) == 4
    assert {c.function for c in doubled} == {-1}
