"""Lists the commands of `stowage`: each is a module of `stowage.flows` that runs as `python -m` too.

To add one: a module with a function `main`, whose signature Typer reads, and a line here; a module with several
commands has a Typer program `application` instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        module: the module that is imported when it runs, and not before.
        help: a sentence for `stowage --help`.
        words: `main` reads the words of the command line itself.
        group: the module has commands of its own, in the Typer program `application`.
    """

    module: str
    help: str
    words: bool = False
    group: bool = False


COMMANDS = {
    "init": Command("stowage.flows.init", "Make a project out of this repository, or bring one up to date."),
    "plan": Command("stowage.flows.plan", "Plan the training step that params.yaml describes."),
    "train": Command("stowage.flows.train", "Plan the training step, and train under the plan."),
    "show": Command("stowage.flows.show", "Print the table of the last run."),
    "report": Command(
        "stowage.flows.report", "Write a page about the plan, and about its training as far as there is one."
    ),
    "compare": Command("stowage.flows.compare", "Compare the plan with that of another revision or folder."),
    "batch-size": Command("stowage.flows.batch_size", "Find the batch size that takes least time per sample."),
    "curve": Command(
        "stowage.flows.step_curve", "Predict step time against budget, before a budget is chosen or a card is bought."
    ),
    "device": Command("stowage.flows.device", "Measure this machine and make it the target of plans."),
    "benchmark": Command("stowage.flows.benchmark", "Measure plans beside plain PyTorch, in turns.", group=True),
    "gpu": Command(
        "stowage.flows.gpu", "Measure, plan and train on a GPU, in steps that go on after an interruption.", True
    ),
}
"""Name -> command, in the order of `--help`: what a project needs first, first."""
