"""Names and words of any content: in code they are literals, or the tables that have them are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stowage.flows import fit
from stowage.stages.codegen import emit_step, manifest_of
from stowage.stages.ir.errors import StowageError, TableError
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.trace import TraceTables, Value
from stowage.stages.runtime.program import load_step
from tests.api.beside_plain import Script, adamw, rows, square, trains_equally
from tests.codegen.test_step_text import tiny
from tests.ir.test_source import EVIL

RAN = Path("/tmp/stowage-a-string-was-run")
TOUCH = f"__import__('pathlib').Path({str(RAN)!r}).touch()"
NAMES = [
    f'w" if not {TOUCH} else "w',
    f"w'] ; {TOUCH} ; x = run.parameter['w",
    "back\\",
    "new\nline",
    f'x"""\n{TOUCH}\n"""',
    "é🙂",
    "run",
    "class",
    "{x}",
]


@pytest.fixture(autouse=True)
def nothing_runs() -> Any:
    RAN.unlink(missing_ok=True)
    yield
    assert not RAN.exists(), "a string was run"


class Named(nn.Module):
    """Parameters, buffers and modules of any names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(f"m {name}", nn.Linear(8, 8))
        self.register_parameter(f"p {name}", nn.Parameter(torch.ones(8)))
        self.register_parameter(name, nn.Parameter(torch.ones(8)))
        self.register_buffer(f"b {name}", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(self, f"m {self.name}")(x) * getattr(self, f"p {self.name}") + getattr(self, f"b {self.name}")
        return nn.functional.dropout(x.tanh(), 0.1) * getattr(self, self.name)


def script(name: str) -> Callable[[], Script]:
    def make() -> Script:
        model = Named(name)
        return Script(model, adamw(model), square, rows())

    return make


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("fit_stores")
def test_parameters_of_any_name_train(name: str) -> None:
    if "." in name:
        with pytest.raises(KeyError):  # PyTorch's own
            Named(name)
        name = name.replace(".", "·")
    trains_equally(script(name), "120%")


@pytest.mark.usefixtures("fit_stores")
def test_so_they_do_clipped_and_accumulated() -> None:
    name = 'w" if not eval("1") else "w'
    model, other = Named(name), Named(name)
    other.load_state_dict(model.state_dict())
    optimizer = adamw(other)
    batches = rows(4)
    step = fit(model, batches[0], adamw(model), device_budget="150%", loss=square, accumulate=2, max_grad_norm=0.1)
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        step(batch, update=i % 2 == 1)
        torch.manual_seed(i)
        square(other(batch), None).backward()
        if i % 2 == 1:
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("field", ["device", "method", "plan_hash"])
@pytest.mark.parametrize("text", [*EVIL, *NAMES])
def test_words_of_the_summary_stay_remarks(field: str, text: str) -> None:
    prepared, solved, expected = tiny()
    summary: PlanSummary = replace(solved.summary, **{field: text})
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, summary)
    load_step(source, manifest_of(source, "", "").source_hash, "step.py")
    assert source.count("\n") == expected.count("\n")


@pytest.mark.parametrize("text", [*EVIL, *NAMES])
def test_labels_and_models_stay_texts(text: str) -> None:
    prepared, solved, _ = tiny()
    trace = replace(prepared.trace, meta=replace(prepared.trace.meta, model=text))
    labelled = [replace(row, step=text) for row in solved.rows]
    nodes = [replace(node, name=text) for node in prepared.nodes]
    source = emit_step(trace, nodes, labelled, solved.summary)
    load_step(source, manifest_of(source, "", "").source_hash, "step.py")


def changed_value(trace: TraceTables, position: int, **fields: Any) -> TraceTables:
    values: list[Value] = list(trace.values)
    values[position] = replace(values[position], **fields)
    return replace(trace, values=values)


def changed_call(trace: TraceTables, **fields: Any) -> TraceTables:
    position = next(i for i, c in enumerate(trace.calls) if "dtype" in c.arguments)
    calls = list(trace.calls)
    calls[position] = replace(calls[position], **fields)
    return replace(trace, calls=calls)


ARGUMENTS = '{"args":[[2]],"kwargs":{"dtype":{"dtype":"float32"},"device":{"device":"cpu"}}}'
EVIL_TABLES: dict[str, Callable[[TraceTables], TraceTables]] = {
    "a value's name": lambda t: changed_value(t, 3, name=f"x; {TOUCH}"),
    "a name that is ours": lambda t: changed_value(t, 3, name="run"),
    "a value's source": lambda t: changed_value(t, 0, source=f'parameter["x"]; {TOUCH}; run.buffer:x'),
    "an attribute of run": lambda t: changed_value(t, 0, source="_tier:x"),
    "a value's dtype": lambda t: changed_value(t, 3, dtype=f"float32; {TOUCH}"),
    "an attribute of torch": lambda t: changed_value(t, 3, dtype="load"),
    "an operator": lambda t: changed_call(t, target=f"aten.zeros.default; {TOUCH}; aten.x.y"),
    "a dtype": lambda t: changed_call(t, arguments=ARGUMENTS.replace("float32", f"float32; {TOUCH}")),
    "a device": lambda t: changed_call(t, arguments=ARGUMENTS.replace('"cpu"', f'"cpu\\"); {TOUCH} #"')),
    "a float": lambda t: changed_call(t, arguments=f'{{"args":[{{"float":"1\\"); {TOUCH} #"}}],"kwargs":{{}}}}'),
    "a keyword": lambda t: changed_call(t, arguments=f'{{"args":[],"kwargs":{{"x={TOUCH}, y": 1}}}}'),
    "a kind": lambda t: changed_call(t, arguments='{"args":[{"load":"x"}],"kwargs":{}}'),
}


@pytest.mark.parametrize("change", EVIL_TABLES)
def test_tables_that_would_become_code_are_refused(change: str, tmp_path: Path) -> None:
    prepared, solved, _ = tiny()
    trace = EVIL_TABLES[change](prepared.trace)
    trace.save(tmp_path)  # with the hash of what it holds

    def run(found: TraceTables) -> None:
        source = emit_step(found, prepared.nodes, solved.rows, solved.summary)
        load_step(source, manifest_of(source, "", "").source_hash, "step.py")

    with pytest.raises(TableError, match="dvc repro"):
        run(TraceTables.load(tmp_path))
    with contextlib.suppress(StowageError):  # without the check of all tables: what codegen itself looks at
        run(trace)
