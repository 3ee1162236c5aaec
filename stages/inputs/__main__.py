"""Brings `artifacts/inputs.yaml` and dvc.yaml up to date with params.yaml: `python -m stowage.stages.inputs`."""

from __future__ import annotations

from pathlib import Path

from stowage.stages.inputs import refresh
from stowage.stages.ir.command import run_stage
from stowage.stages.settings import load_settings


def main() -> None:
    """List files that parameters name, and drop those that no longer exist; `trace` lists what the model imports."""
    for sentence in refresh(Path(), load_settings()):
        print(sentence)


if __name__ == "__main__":
    run_stage(main)
