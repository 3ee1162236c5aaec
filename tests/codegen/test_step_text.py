"""Generated code: readable, the same bytes for the same plan, and run only if it is what codegen wrote."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.runtime.bind import bind
from stowage.stages.runtime.program import load_step
from stowage.stages.solve.summary import Solved
from stowage.stages.trace import trace_step
from stowage.stages.workload.randomness import seeded
from tests.runtime.beside_eager import assert_equal_training
from tests.solve.prepared import Prepared, prepare_trace, prepared_zoo
from tests.zoo import Entry

GOLDEN = Path(__file__).with_name("golden_step.txt")


class Tiny(nn.Module):
    """Wide in the middle, so that recomputing pays; dropout, statistics and an in-place call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(64, 2, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu_(self.norm(self.up(x)))
        return self.down(self.drop(torch.tanh(x))).pow(2).mean()


def build() -> Entry:
    with seeded(0):
        return Tiny(), {"x": torch.randn(32, 4)}, lambda outputs, _: outputs


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def tiny() -> tuple[Prepared, Solved, str]:
    model, batch, loss = build()
    prepared = prepare_trace(trace_step(model, batch, loss=loss, optimizer=sgd(model)))
    solved = prepared.smallest()
    return prepared, solved, emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)


def test_golden() -> None:
    """`STOWAGE_UPDATE_GOLDENS=1 pytest tests/codegen` writes the file anew; read the difference before you commit."""
    source = tiny()[2]
    if os.environ.get("STOWAGE_UPDATE_GOLDENS"):
        GOLDEN.write_text(source)
    assert source == GOLDEN.read_text()


def test_the_golden_step_trains() -> None:
    prepared, solved, source = tiny()
    assert ", again" in source
    # What a bias adds, the normalisation behind it takes away.
    assert_equal_training(build, prepared, solved, optimizer=sgd, still=["up.bias"])


@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5", "lstm"])
def test_equal_plans_give_equal_bytes(name: str) -> None:
    prepared = prepared_zoo(name)
    sources = {
        emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
        for solved in (prepared.smallest(), prepared.smallest())
    }
    assert len(sources) == 1


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_one_line_an_operation(name: str) -> None:
    prepared = prepared_zoo(name)
    solved = prepared.smallest()
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
    lines = source.splitlines()
    computed = [r for r in solved.rows if r.action == "compute"]
    assert sum("  # block " in line or "  # shared," in line for line in lines) == len(computed)
    assert sum(line.endswith(", again") for line in lines) == sum(r.recompute for r in solved.rows)
    updates = sum(n.phase == "update" for n in prepared.nodes)
    assert sum("run.update(" in line for line in lines) == updates
    assert sum("run.random.record(" in line for line in lines) == sum("run.random.forget(" in line for line in lines)
    steps = list(dict.fromkeys(r.step for r in solved.rows))
    assert all(f'    run.begin("{step}")' in lines for step in steps)
    ast.parse(source)
    assert "MiB" in lines[2]
    assert solved.summary.plan_hash in source
    assert "exec" not in source


def test_every_name_is_freed_when_its_storage_is() -> None:
    """After the step only the loss is left among its local names, apart from persistent tensors and views of them."""
    prepared = prepared_zoo("gpt2")
    solved = prepared.smallest()
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary)
    alive: set[str] = set()
    for node in sorted(ast.walk(ast.parse(source)), key=lambda n: getattr(n, "lineno", 0)):
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        if isinstance(node, ast.Assign):
            alive |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Delete):
            alive -= {n.id for n in names}
    storage = {v.name: prepared.trace.storages[v.storage] for v in prepared.trace.values}
    left = {n for n in alive if n in storage and storage[n].role == "temporary"}
    loss = prepared.trace.values[prepared.trace.meta.loss_value].storage
    assert {prepared.trace.storages.index(storage[n]) for n in left} == {loss}


def test_edited_code_is_refused() -> None:
    prepared, solved, source = tiny()
    manifest = manifest_of(source, solved.summary.plan_hash, solved.summary.configuration_hash)
    assert callable(load_step(source, manifest.source_hash, "step.py"))
    model = build()[0]
    for edited in (source + "\n", source.replace("aten.", "aten. ", 1), ""):
        with pytest.raises(PlanMismatchError, match=r"step.py is not what codegen wrote .* run `dvc repro` again"):
            bind(edited, manifest.source_hash, "step.py", prepared.trace, model, sgd(model))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: setattr(m, "up", nn.Linear(4, 63)), "up.weight"),
        (lambda m: setattr(m, "down", nn.Linear(64, 2, bias=False).bfloat16()), "down.weight"),
        (lambda m: setattr(m, "norm", nn.Identity()), r"norm.weight' is absent"),
    ],
)
def test_a_plan_for_another_model_is_refused(change: Any, sentence: str) -> None:
    prepared, _, source = tiny()
    model = build()[0]
    change(model)
    with pytest.raises(PlanMismatchError, match=f"another model.*{sentence}") as caught:
        bind(source, manifest_of(source, "", "").source_hash, "step.py", prepared.trace, model, sgd(model))
    assert "\n" not in str(caught.value)


def test_updates_without_an_optimizer_are_refused() -> None:
    prepared, _, source = tiny()
    model, batch, _ = build()
    program = bind(source, manifest_of(source, "", "").source_hash, "step.py", prepared.trace, model, None)
    with pytest.raises(PlanMismatchError, match="no optimizer was given"):
        program(batch)


def test_a_fault_inside_the_step_shows_its_line() -> None:
    import traceback

    prepared, _, source = tiny()
    model, _, _ = build()
    program = bind(source, manifest_of(source, "", "").source_hash, "step_tiny.py", prepared.trace, model, sgd(model))
    with pytest.raises(RuntimeError) as caught:
        program({"x": torch.randn(32, 5)})
    text = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "step_tiny.py" in text
    assert "torch.addmm(" in text, "the traceback quotes the generated line"
