"""Make a Stowage project out of this repository, or bring one up to date with the installed version.

stowage init --model my_model:build
stowage init --model gpt2
stowage init --model path/of/a/checkpoint
stowage init planning                          in a folder of its own
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stowage.flows.pipeline.command import one_sentence, run_command
from stowage.flows.starter.start import start


def main(
    folder: Annotated[Path, typer.Argument(help="The project's folder, in a Git repository.")] = Path(),
    model: Annotated[
        str | None,
        typer.Option(
            help="A function `module:function` of yours, a model type of transformers, or a checkpoint's folder."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
) -> None:
    """Write the files of a Stowage project, or bring them up to date; what is there already is kept.

    That is params.yaml, dvc.yaml, prefect.yaml, a workflow for continuous integration, lines for .gitignore, an example
    of a model where there is none, and this machine's description in artifacts/device.json.
    """
    with one_sentence():
        folder.mkdir(parents=True, exist_ok=True)
        start(folder.resolve(), model=model, device=device, dry=dry, say=typer.echo, ask=_ask)


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default))


if __name__ == "__main__":
    run_command(main)
