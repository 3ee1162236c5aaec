"""A checkpoint in progress belongs to contents, a plan to what it was made from, and other losses are a failure."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from stowage.stages.inputs.origin import require_origin
from stowage.stages.ir.errors import ParameterError, PlanMismatchError, StaleStep
from stowage.stages.ir.plan import PlanSummary
from stowage.stages.ir.run import StepRecord
from stowage.stages.ir.table import read_record
from stowage.stages.settings import Settings, load_settings, parse_settings
from stowage.stages.train.checkpoint import saved_iteration
from stowage.stages.train.comparison import require_equal, unequal
from stowage.stages.train.identity import run_name
from stowage.stages.train.setup import Setup
from stowage.stages.workload.models import build_model
from tests.pipeline.pipeline_projects import merge
from tests.train.test_killed_processes import PARAMETERS, PLANNING, losses, run, whole_project

__all__ = ["whole_project"]

MODEL = """
import os
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": (self.b(self.a(x).tanh()).pow(2).mean() * float(os.environ.get("SCALE", "1")))}

def build():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(4, 8)}
"""
CALLABLE = {
    "trace": {"model": {"callable": "my_model:build"}, "optimizer": {"name": "SGD", "arguments": {"lr": 0.1}}},
    "profile": {"costs": "roofline"},
    "options": {"max_exact_nodes": 0, "workers": 1, "time_limit_s": 1.0},
    "solve": {"device_budget": "100%", "memory_slots": 50},
    "train": {"steps": 4, "compare_eager": True, "measure_every": 0},
}


def parameters(folder: Path, **changes: Any) -> None:
    """Edit those of a project; dots are written as underscores twice."""
    path = folder / "params.yaml"
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    path.write_text(yaml.safe_dump(content))


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / ".stowage" / "checkpoints").rglob("*.safetensors"))


def cut_off(folder: Path, at: int) -> None:
    """A run that is killed with a checkpoint of `at` steps: the same files, and no waiting for the moment."""
    code = (
        "import os, runpy, signal\nimport stowage.stages.train.loop as loop\nsave = loop.save_checkpoint\n"
        "def saved(path, run, iteration, *rest):\n    save(path, run, iteration, *rest)\n"
        f"    if iteration >= {at}:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "loop.save_checkpoint = saved\nrunpy.run_module('stowage.stages.train', run_name='__main__')"
    )
    done = run(folder, code=code)
    assert done.returncode == -9, done.stderr
    (checkpoint,) = checkpoints(folder)
    assert saved_iteration(checkpoint) == at


@pytest.fixture
def project(whole_project: Path, tmp_path: Path) -> Path:
    """Planned, and not trained."""
    folder = tmp_path / "project"
    shutil.copytree(whole_project, folder, ignore=shutil.ignore_patterns("train", ".stowage"))
    return folder


def test_a_checkpoint_past_the_steps_is_not_used_and_not_lost(project: Path, whole_project: Path) -> None:
    cut_off(project, 48)
    parameters(project, train__steps=6)
    done = run(project, "train")
    assert done.returncode == 0, done.stderr
    assert losses(project) == losses(whole_project)[:6]
    parameters(project, train__steps=60)
    (left,) = checkpoints(project)
    assert saved_iteration(left) == 48
    done = run(project, "train")
    assert done.returncode == 0, done.stderr
    assert losses(project) == losses(whole_project)
    assert checkpoints(project) == []


@pytest.mark.long
def test_a_run_on_another_text_begins_anew(project: Path) -> None:
    text = project / "text.txt"
    text.write_text("the quick brown fox " * 200)
    parameters(project, train__data={"source": "text.txt"}, train__steps=10, train__compare_eager=True)
    cut_off(project, 8)
    text.write_text("jumps over the lazy dog " * 200)
    done = run(project, "train")
    assert done.returncode == 0, done.stderr  # the losses are plain PyTorch's on this text
    (left,) = checkpoints(project)
    assert saved_iteration(left) == 8
    text.write_text("the quick brown fox " * 200)
    done = run(project, "train")
    assert done.returncode == 0, done.stderr
    assert checkpoints(project) == [], "what the first had left, went on"


CHANGES: dict[str, Any] = {
    "trace__model__overrides__n_layer": 3,
    "trace__model__overrides__activation_function": "relu",
    "trace__model__overrides__attn_pdrop": 0.5,
    "trace__loss": "my_model:loss",
    "trace__optimizer__arguments__lr": 1.0,
    "trace__seed": 5,
    "trace__batch_size": 3,
}


def test_training_alone_refuses_another_model_than_the_plans(project: Path) -> None:
    parameters(project, trace__model__overrides__attn_pdrop=0.5)
    done = run(project, "train")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(
        "error: trace.model.overrides.attn_pdrop is not what the plan was made from: run `dvc repro`"
    )


@pytest.mark.parametrize("key", CHANGES)
def test_whatever_the_trace_depends_on_is_compared(project: Path, key: str) -> None:
    summary = read_record(project / "artifacts" / "solve" / "summary.json", PlanSummary)
    origin = project / "artifacts" / "origin.json"
    require_origin(origin, project, load_settings(project / "params.yaml"), summary.configuration_hash)
    parameters(project, **{key: CHANGES[key]})
    settings = load_settings(project / "params.yaml")
    with pytest.raises(PlanMismatchError, match=re.escape(key.replace("__", "."))):
        require_origin(origin, project, settings, summary.configuration_hash)


def test_the_plan_of_another_trace_is_refused(project: Path) -> None:
    origin = project / "artifacts" / "origin.json"
    with pytest.raises(PlanMismatchError, match="trace is not what the plan was made from"):
        require_origin(origin, project, load_settings(project / "params.yaml"), "another")


@pytest.fixture(scope="module")
def planned_mine(tmp_path_factory: pytest.TempPathFactory, whole_project: Path) -> Path:
    """A project with a model of its own, planned."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_model.py").write_text(MODEL)
    (folder / "params.yaml").write_text(yaml.safe_dump(CALLABLE))
    shutil.copytree(whole_project / "artifacts", folder / "artifacts", ignore=lambda *_: {*PLANNING, "train"})
    done = run(folder, *PLANNING)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def mine(planned_mine: Path, tmp_path: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(planned_mine, tmp_path / "mine"))


def test_training_alone_refuses_other_code_than_the_plans(mine: Path) -> None:
    (mine / "my_model.py").write_text(MODEL.replace("tanh", "relu"))
    done = run(mine, "train")
    assert done.returncode == 1
    assert "error: my_model.py is not what the plan was made from" in done.stderr


def test_losses_that_are_not_plain_pytorchs_are_a_failure(mine: Path) -> None:
    """The model reads a number where nobody sees it."""
    done = run(mine, "train", SCALE="2")
    assert done.returncode == 1
    assert "error: 4 of 4 losses under the plan are not plain PyTorch's, the first in step 0" in done.stderr
    assert "differs" in done.stdout, "in the table"
    metrics = json.loads((mine / "artifacts" / "train" / "metrics.json").read_text())
    assert metrics["losses_equal"] is False
    assert checkpoints(mine) == []


def test_losses_that_are_no_numbers_are_equal() -> None:
    def records(*losses: float) -> list[StepRecord]:
        return [StepRecord(i, loss, 0.0, 0.0, 0.0, 0.0, -1) for i, loss in enumerate(losses)]

    nan, other = float("nan"), -float("nan")
    assert unequal(records(1.0, nan), records(1.0, other)) == []
    assert [r.iteration for r in unequal(records(1.0, nan), records(1.0, 2.0))] == [1]
    assert unequal(records(1.0, 2.0), []) == []
    require_equal(records(nan), records(nan))
    with pytest.raises(StaleStep, match="1 of 2 losses"):
        require_equal(records(1.0, 2.0), records(1.0, 2.0000000000000004))


WAYS_TO_FAIL = {
    "raise ValueError('no')": "raised ValueError: no in",
    "def (:": "has a mistake of syntax in",
    "import sys; sys.exit(0)": "called sys.exit(0)",
    "import sys; sys.exit()": "called sys.exit(None)",
    "import no_such_module": "raised ModuleNotFoundError: No module named 'no_such_module'",
    "class E(BaseException): pass\nraise E": "raised E",
    "build = 3": "is not a function",
    "def build(): raise KeyError('x')": "raised KeyError: 'x' in",
    "def build():\n    import sys\n    sys.exit(0)": "called sys.exit(0)",
    "def build(): return 3": "must return (model, sample_batch), not int",
}


@pytest.mark.parametrize("code", WAYS_TO_FAIL)
def test_code_of_the_users_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "failing_model.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_model", raising=False)
    with pytest.raises(ParameterError, match=re.escape(WAYS_TO_FAIL[code])) as caught:
        build_model(callable="failing_model:build", seed=0)
    assert "\n" not in str(caught.value)


def test_code_of_the_users_that_ends_while_it_is_imported_fails_the_stage(whole_project: Path, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(CALLABLE))
    shutil.copytree(whole_project / "artifacts", tmp_path / "artifacts", ignore=lambda *_: {*PLANNING, "train"})
    done = run(tmp_path, "trace")
    assert done.returncode == 1
    assert "called sys.exit(0)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "artifacts" / "trace").exists()


def test_a_forward_that_ends_the_process_fails_the_stage(whole_project: Path, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(
        MODEL.replace("        return", "        import sys; sys.exit(0)\n        return")
    )
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(CALLABLE))
    shutil.copytree(whole_project / "artifacts", tmp_path / "artifacts", ignore=lambda *_: {*PLANNING, "train"})
    done = run(tmp_path, "trace")
    assert done.returncode == 1
    assert "called sys.exit(0)" in done.stderr


SCHEDULES: list[tuple[dict[str, Any], str]] = [
    ({"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 40}}, "fails at step"),
    ({"name": "PolynomialLR", "arguments": {"total_iters": 10, "power": "x"}}, "fails at step"),
    ({"name": "CosineAnnealingLR", "arguments": {"T_max": 0}}, "CosineAnnealingLR"),
    ({"name": "ExponentialLR", "arguments": {"gamma": 1e300}}, "a learning rate of inf"),
    ({"name": "StepLR", "arguments": {"step_size": "a"}}, "StepLR"),
]


@pytest.mark.parametrize(("schedule", "said"), SCHEDULES)
def test_a_schedule_that_would_fail_fails_before_the_first_step(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        Setup.of(settings_of(train={"schedule": schedule}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"betas": [0.9]}, {"lr": "x"}, {"betas": "ab"}, {"fused": 3, "foreach": 2}])
def test_arguments_of_an_optimizer_are_tried(arguments: dict[str, Any]) -> None:
    content = {"name": "AdamW", "arguments": arguments}
    with pytest.raises(ParameterError, match=r"trace\.optimizer AdamW"):
        Setup.of(settings_of(trace={"optimizer": content}))


def settings_of(**changes: Any) -> Settings:
    content = json.loads(json.dumps(PARAMETERS))
    if "name" in changes.get("train", {}).get("schedule", {}):
        del content["train"]["schedule"]
    merge(content, changes)
    return parse_settings(content)


@pytest.fixture
def named(whole_project: Path, tmp_path: Path) -> Callable[..., str]:
    """The name of a run with something changed."""
    summary = read_record(whole_project / "artifacts" / "solve" / "summary.json", PlanSummary)
    (tmp_path / "code.py").write_text("1")

    def name(edit: Callable[[nn.Module], None] = lambda model: None, code: str = "1", **changes: Any) -> str:
        settings = settings_of(**changes)
        setup = Setup.of(settings)
        edit(setup.model)
        (tmp_path / "code.py").write_text(code)
        return run_name(tmp_path, settings, summary, setup, ["code.py"])

    return name


def test_names_of_runs(named: Callable[..., str], tmp_path: Path) -> None:
    def one_bit(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3

    text = tmp_path / "text.txt"
    text.write_text("a" * 500)
    same = named()
    assert named() == same
    assert named(train={"steps": 5, "checkpoint_every": 2, "measure_every": 0}) == same, "how far, and how often"
    others = [
        named(one_bit),
        named(code="2"),
        named(train={"seed": 1}),
        named(train={"schedule": {"arguments": {"T_max": 61}}}),
        named(train={"data": {"source": str(text)}}),
    ]
    text.write_text("a" * 499 + "b")
    others.append(named(train={"data": {"source": str(text)}}))
    assert len({same, *others}) == 1 + len(others)
