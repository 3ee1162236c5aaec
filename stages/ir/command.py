"""Parts that commands share: where artifacts are kept, options with their help, and errors as one sentence."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from stowage.stages.ir.code_record import require_recorded
from stowage.stages.ir.errors import StowageError

ARTIFACTS = Path("artifacts")
STORE = Path(".stowage")
DEVICE = ARTIFACTS / "device.json"

USAGE_STATUS = 2
"""Exit status of a command that was asked for something it does not have."""
INTERRUPTED_STATUS = 130
_LONGEST = 300
_STAGE = "Takes no options: its parameters are in params.yaml of the current folder."


class Parser(argparse.ArgumentParser):
    """Parses the options of `python -m MODULE`; `--help` says what the module does, an error is one line, status 2."""

    def __init__(self, about: str | None) -> None:
        super().__init__(
            prog=_program(),
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """End the process with one line (argparse would print the usage before it)."""
        self.exit(USAGE_STATUS, f"error: {message} (`{self.prog} --help` says what there is)\n")


def run_stage(main: Callable[[], None]) -> None:
    """Run a stage; a `StowageError` ends the process with its sentence and exit code 1."""
    asked = False
    try:
        about = [sys.modules["__main__"].__doc__, main.__doc__, _STAGE]
        Parser("\n\n".join(text.strip() for text in about if text)).parse_args()
        asked = True
        require_recorded(Path(), _running().rpartition(".")[2])
        main()
    except StowageError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{where}: nothing half-written was left behind.", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        print("error: the memory of this machine is full: make the model or the batch smaller.", file=sys.stderr)
        sys.exit(1)
    except SystemExit as error:
        if not asked:  # `--help`, or an unknown option
            raise
        # The user's code called it: the stage's result is missing, so this is an error.
        print(f"error: code that the model runs called sys.exit({error.code!r}): take that out.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)
    except Exception as error:
        if os.environ.get("STOWAGE_TRACEBACK") == "long":
            raise
        print(f"error: {_unexpected(error)}", file=sys.stderr)
        sys.exit(1)


def one_line(text: str) -> str:
    """Put a text on one line and escape what a terminal cannot print."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def _unexpected(error: Exception) -> str:
    """Describe an exception that no stage expects: a bug of Stowage or of the model, or artifacts that were edited."""
    said = one_line(str(error))[:_LONGEST]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return (
        f"{_running()} met {type(error).__name__}{': ' if said else ''}{said}{line}: if artifacts were edited, make "
        "them again (`dvc repro --force`); else it is a mistake in the model's code or in Stowage, and "
        "STOWAGE_TRACEBACK=long shows where."
    )


def _program() -> str:
    """Return the command that starts this process: a module, or a command of the program `stowage`."""
    name = _running()
    if "." in name:
        return f"python -m {name}"
    return " ".join(["stowage", *sys.argv[1:2]])


def _running() -> str:
    """Return the name of the module that was started, as it is given on the command line."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
