"""What must hold of every end."""

from __future__ import annotations

import re
from pathlib import Path

from tests.torture.forks import Ended
from tests.torture.mutations import CANARY

LONGEST_SENTENCE = 2000
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")


def fault(ended: Ended) -> str:
    """Empty for a success, or for a failure that says what is wrong in one sentence; else what is wrong with it."""
    if CANARY.exists():
        CANARY.unlink()
        return "something ran that came from a file or a name"
    if ended.too_long:
        return f"it took more than {ended.took_s:.0f} s"
    if "Traceback (most recent call last)" in ended.said + ended.shown:
        return "a traceback"
    if ended.code == 0:
        return ""
    if ended.code < 0:
        return f"ended by signal {-ended.code}"
    lines = [line for line in ended.said.splitlines() if line.strip()]
    if not lines or not lines[-1].startswith("error: "):
        return "no sentence at the end"
    if len(lines[-1]) > LONGEST_SENTENCE:
        return f"a sentence of {len(lines[-1])} characters"
    return ""


def left(folder: Path) -> str:
    """Empty unless temporary files are left."""
    found = [p.relative_to(folder).as_posix() for p in _temporary(folder)]
    return f"left behind: {', '.join(found[:3])}" if found else ""


def forget(folder: Path) -> None:
    """Remove temporary files."""
    for path in _temporary(folder):
        path.unlink()


def _temporary(folder: Path) -> list[Path]:
    return [p for p in folder.rglob(".*") if _TEMPORARY.fullmatch(p.name)]
