"""Code of the user's that is imported or called while something is set up: however it fails, in one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from stowage.stages.ir.errors import ParameterError, StowageError


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of the user's inside; `what` begins the sentence.

    Raises:
        ParameterError: it raised something, has a mistake of syntax, or called `sys.exit`, whatever with: what is to be
            made is not there.
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
    """The innermost line outside of Python's import system and this project."""
    own = __file__.rpartition("workload")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(("<frozen", own)) and "importlib" not in f.filename]
    return f" in {lines[-1].filename}:{lines[-1].lineno}" if lines else ""
