"""`step.py` of a plan that freezes: what only a unit's gradient needs is under its condition, the rest is as ever."""

from __future__ import annotations

import ast
from dataclasses import replace

from stowage.stages.codegen import emit_step
from stowage.stages.freezing.units import units_of
from stowage.stages.runtime.whitelist import checked
from tests.solve.prepared import prepared_zoo

MLP = "transformer.h.1.mlp.c_fc"


def blocks(source: str) -> list[tuple[str, str]]:
    """The conditions and what is under them."""
    (step,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return [(ast.unparse(n.test), "\n".join(map(ast.unparse, n.body))) for n in step.body if isinstance(n, ast.If)]


def test_updates_and_what_only_they_need_are_under_their_unit() -> None:
    prepared = prepared_zoo("gpt2")
    solved, units = prepared.solve(), units_of(prepared.trace)
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, (), units)
    found = blocks(source)
    own = [body for condition, body in found if condition == f"run.active('{MLP}')"]
    assert any(f"run.update('{MLP}.weight'" in body and ".mm(" in body for body in own)
    assert any(f"run.update('{MLP}.bias'" in body and ".sum(" in body for body in own)
    released = [body for condition, body in found if condition == f"not run.active('{MLP}')"]
    assert any(body.endswith("= None") for body in released), "the input of the product is dropped in forward"
    updates = source.count("run.update(")
    assert updates == sum(len(unit.parameters) for unit in units)
    assert updates == sum(body.count("run.update(") for _, body in found), "every update has a condition"
    assert 'run.active("transformer.wte.weight", ..., ' in source, "units in a row are named by the first and the last"
    checked(source, "step.py")


def test_normalisations_leave_out_gradients_that_nobody_needs() -> None:
    prepared = prepared_zoo("gpt2")
    solved, units = prepared.solve(), units_of(prepared.trace)
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, (), units)
    calls = [line for line in source.splitlines() if "aten.native_layer_norm_backward" in line]
    assert calls
    assert all("[run.active(" in line for line in calls)


def test_without_units_the_text_is_as_it_was() -> None:
    prepared = prepared_zoo("gpt2")
    solved = prepared.smallest()
    source = emit_step(prepared.trace, prepared.nodes, solved.rows, solved.summary, ())
    assert "run.active" not in source
    assert "= None" not in source
    stated = replace(solved.summary, units=3, active_units=1)
    text = emit_step(prepared.trace, prepared.nodes, solved.rows, stated, (), units_of(prepared.trace))
    assert "At most 1 of 3 units train in a step" in text
    kept = [line.strip() for line in text.splitlines() if "run.active" not in line and not line.endswith("= None")]
    whole = [line.strip() for line in source.splitlines()]
    operations = [line for line in whole if "  # " in line]
    assert [line for line in kept if "  # " in line and "layer_norm_backward" not in line] == [
        line for line in operations if "layer_norm_backward" not in line
    ]
