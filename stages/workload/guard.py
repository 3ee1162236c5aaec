"""Reports errors of the user's code, which is imported or called during set-up, in one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from stowage.stages.ir.errors import ParameterError, StowageError


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's code inside the block; `what` begins the sentence of an error.

    Raises:
        ParameterError: the code raised anything, has a syntax error, or called `sys.exit` with any argument.
    """
    try:
        yield
    except (StowageError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise ParameterError(f"{what} called sys.exit({error.code!r}){_where(error)}: take that out.") from error
    except SyntaxError as error:
        line = f"{error.filename}:{error.lineno}"
        raise ParameterError(f"{what} has a mistake of syntax in {line} ({error.msg}): mend it.") from error
    except BaseException as error:
        said = " ".join(str(error).split())
        text = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise ParameterError(f"{what} raised {text}{_where(error)}.") from error


def _where(error: BaseException) -> str:
    """Return the innermost line outside of Python's import system and this project."""
    own = __file__.rpartition("workload")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(("<frozen", own)) and "importlib" not in f.filename]
    return f" in {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
