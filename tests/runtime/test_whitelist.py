"""A step consists of calls and assignments, and anything else is refused before it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.runtime.program import load_step, source_hash
from stowage.stages.runtime.whitelist import checked

HEAD = '''"""One."""

import torch
from torch import Tensor

from stowage.stages.runtime import Iteration

aten = torch.ops.aten


@torch.no_grad()
def step(run: Iteration) -> Tensor:

'''

RIGHT = [
    'x = run.parameter["w"]',
    "x = run.input['a']\n    y, _ = aten.native_dropout.default(x, 0.1, True)\n    del x, y",
    'x = run.input["a"]\n    z = x.view([1, -1])\n    with run.random.record(3):\n        z = aten.rand.default([1])',
    'x = aten.full.default([2], float("-inf"), dtype=torch.float32, device=torch.device("cpu"))',
    "x = aten.full.default([2], complex(1.0, 2.0), layout=torch.strided, memory_format=torch.contiguous_format)",
    "with run.as_in_forward():\n        x = aten.rand.default([1])\n    run.keep_offloaded('x')",
    'gradients = {\n        "a": run.gradient["a"],\n    }\n    run.update_all(gradients)\n    del gradients',
    'if run.active("h.0", ..., "h.3"):\n        x = run.input["a"]',
    'if not run.active("h.0"):\n        x = y = None',
    'x = aten.rand.default([run.active("h.0"), False])',
]
OTHER = (
    "x = torch.ops.prims.iota.default(3, start=0, step=1, dtype=torch.int64, device=torch.device('cpu'), "
    "requires_grad=False)"
)

WRONG = [
    "import os",
    "x = eval('1')",
    "x = __import__('os')",
    "x = open('f')",
    "print('x')",
    "x = run.parameter['w' if not eval('1') else 'w']",
    "x = run.random",
    "x = run._tier",
    "x = run.parameter[eval('1')]",
    "x = run.parameter['w'].__class__",
    "run.__init__()",
    "run.update(eval('1'))",
    "run.random.record(1).__enter__()",
    "x = torch.load('f')",
    "x = torch.ops.load_library('f')",
    "x = torch.ops.load_library.x.y('f')",
    "x = torch.load",
    "x = torch.device(eval('1'))",
    "x = aten.from_file.default('f', True, 10)",
    "x = aten.add('f')",
    "x = aten.no_such_operator.default(1)",
    "x = aten.__class__.__init__.x(1)",
    "x = [y for y in ()]",
    "x = lambda: 1",
    "x = (y := 1)",
    "x = f'{1}'",
    "x = 1 + 1",
    "x = b'1'",
    "x = never_assigned",
    "x = aten.rand.default(*[1])",
    "x = aten.rand.default(**{'a': 1})",
    "x: int = 1",
    "x += 1",
    "run = 1",
    "aten = 1",
    "torch.ops = 1",
    "x[0] = 1",
    "del run.parameter",
    "del run",
    "del never_assigned",
    "if True:\n        pass",
    "if run.active('a'):\n        pass",
    "if run.active('a'):\n        run.leave([])\n    else:\n        run.leave([])",
    "if run.active('a') or eval('1'):\n        run.leave([])",
    "if run.active(eval('1')):\n        run.leave([])",
    "if run.active(*['a']):\n        run.leave([])",
    "if run.active('a', b='c'):\n        run.leave([])",
    "if run.leave([]):\n        run.leave([])",
    "if not run._active('a'):\n        run.leave([])",
    "run = None",
    "x = y.z = None",
    "while True:\n        pass",
    "for x in ():\n        pass",
    "with open('f') as x:\n        pass",
    "with run.random.record(1) as x:\n        x = 1",
    "try:\n        pass\n    finally:\n        pass",
    "raise ValueError",
    "assert True",
    "global x",
    "def f():\n        pass",
    "class C:\n        pass",
    "yield 1",
    "await run",
    "x = aten.rand.default([1]).numpy()",
    "x = run.input['a']\n    x.share_memory_()",
    "x = run.input['a']\n    del x\n    y = x",
    "return eval('1')",
    "x = ...",
    "1",
    "pass",
]

HEADS = [
    HEAD.replace("import torch\n", "import torch, os\n", 1),
    HEAD.replace("aten = torch.ops.aten", "aten = torch.ops.aten\nprint('x')"),
    HEAD.replace("@torch.no_grad()", "@torch.no_grad()\n@print"),
    HEAD.replace("run: Iteration", "run: Iteration = eval('1')"),
    HEAD.replace("-> Tensor", "-> eval('1')"),
    HEAD.replace("def step", "async def step"),
    HEAD.replace('"""One."""', 'f"""{eval(1)}"""'),
    HEAD.replace("from torch import Tensor", "from torch import load as Tensor"),
    "",
]


@pytest.mark.parametrize("body", RIGHT)
def test_what_codegen_writes_passes(body: str) -> None:
    checked(f"{HEAD}    {body}\n", "step.py")


@pytest.mark.parametrize("body", WRONG)
def test_anything_else_is_refused_before_it_runs(body: str, tmp_path: Path) -> None:
    source = f"{HEAD}    x = run.input['a']\n    {body}\n"
    with pytest.raises(PlanMismatchError, match=r"step\.py.*dvc repro"):
        load_step(source, source_hash(source), "step.py")


def test_operators_of_other_libraries_are_those_of_the_trace() -> None:
    source = f"{HEAD}    {OTHER}\n"
    checked(source, "step.py", {"prims.iota.default"})
    with pytest.raises(PlanMismatchError, match=r"a call of torch\.ops\.prims\.iota\.default"):
        checked(source, "step.py", {"prims.other.default"})


@pytest.mark.parametrize("head", HEADS)
def test_the_head_is_the_known_one(head: str) -> None:
    source = head + "    run.begin('x')\n" if head else "x = 1\n"
    with pytest.raises(PlanMismatchError, match=r"step\.py.*dvc repro"):
        load_step(source, source_hash(source), "step.py")


@pytest.mark.parametrize("source", ["def step(:", "\x00", "(" * 5000, "x = " + "-" * 100_000 + "1"])
def test_no_python_at_all(source: str) -> None:
    with pytest.raises(PlanMismatchError, match="step"):
        checked(source, "step.py")
