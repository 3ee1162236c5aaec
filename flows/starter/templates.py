"""Fills in the texts of the files of a new project."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from stowage.flows.starter.answers import Model

WORKFLOW = ".github/workflows/stowage.yml"


def template(file: str, /, **values: str) -> str:
    """Return a file of the folder `templates`, with `${key}` replaced.

    Names there end in `.template`: DVC takes every `dvc.yaml` in a repository for a pipeline.
    """
    text = files("stowage.flows.starter").joinpath("templates", f"{file}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values) if values else text


def parameters(model: Model, device: str, data: str | None) -> str:
    """Return `params.yaml` of a project that plans `model`.

    Args:
        model: the model to plan.
        device: `cpu` or `cuda`.
        data: a function that makes the batches, None for none.
    """
    lines = ["  model:", f"    {model.kind}: {model.value}"]
    if model.kind != "callable":
        lines += ["  batch_size: 4", "  sequence_length: 128"]
    if data is not None:
        text = f"  data:\n    callable: {data}  # a function of (seed, iteration) that returns a batch"
    elif model.kind == "callable":
        text = (
            f"  # data: {{callable: {model.module}:batches}}  # a function of (seed, iteration) that returns a batch;\n"
            "  # without it every step has the batch that the model's function returns"
        )
    else:
        text = "  data:\n    source: pydoc_topics  # Python's own help texts; or the path of a text or .parquet file"
    return template("params.yaml", model="\n".join(lines), device=device, data=text)


def workflow(root: Path, folder: str, version: str) -> str:
    """Return the workflow of a project in `folder` of its repository, `.` for the repository's root."""
    steps = []
    if (root / "requirements.txt").is_file():
        steps.append("pip install -r requirements.txt")
    if (root / "pyproject.toml").is_file() or (root / "setup.py").is_file():
        steps.append("pip install -e .")
    return template(
        "workflow.yml",
        prefix="" if folder == "." else f"{folder}/",
        folder=folder,
        version=version,
        python="{}.{}".format(*sys.version_info[:2]),
        requirements="".join(f"      - run: {step}\n" for step in steps),
    )
