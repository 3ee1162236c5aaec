"""Runs the program `stowage`. A command's module is imported when it runs: `--help` and completion take no torch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from stowage.flows.cli.commands import COMMANDS
from stowage.flows.pipeline.command import one_sentence, run_typer
from stowage.version import __version__


class Commands(TyperGroup):
    """The commands of `COMMANDS`, by name and help until one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with its help alone, for lists of commands."""
        found = COMMANDS.get(cmd_name)
        return TyperCommand(cmd_name, help=found.help, short_help=found.help) if found else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called, and return it with its words."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, loaded(str(name)), rest


def loaded(name: str) -> Any:
    """Return the command with its own options; a package that it lacks ends the process with a sentence."""
    with one_sentence():
        module = import_module(COMMANDS[name].module)
    if COMMANDS[name].group:
        return typer.main.get_command(module.application)
    main, application = module.main, typer.Typer(add_completion=False)
    if COMMANDS[name].words:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        application.command(name, context_settings=settings, add_help_option=False)(_with_words(main))
    else:
        application.command(name)(main)
    return typer.main.get_command(application)


def _with_words(main: Any) -> Any:
    def command(ctx: typer.Context) -> None:
        sys.exit(main(ctx.args))

    return command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stowage {__version__}")
        raise typer.Exit


application = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)


@application.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan where every tensor of a PyTorch training step lives, so that training fits the memory there is.

    Begin with `stowage init` in your own repository; `stowage COMMAND --help` tells about one command.
    """


def run() -> NoReturn:
    """Run the program with the words of the command line."""
    run_typer(application)


if __name__ == "__main__":
    run()
