"""Run the short exactness suite on every pair of Python and torch that is at hand, and print one table.

A pair is a virtual environment of its own below `.venv-versions`; it is made once. What cannot be had is a line, no
failure; the exit status is 1 if a test fails, or if no pair could run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".venv-versions"
ROOM_BYTES = 8 << 30
"""A release of torch with its libraries takes up to 6 GB."""
OWN_PINS = re.compile(r"(?:torch|torchvision|triton|nvidia-[\w-]+|cuda-[\w-]+)\s*==")
"""Lines of constraints.txt that hang on the release of torch."""


@dataclass(frozen=True)
class Result:
    """What became of a pair."""

    python: str
    torch: str
    said: str
    ran: bool = False
    failed: bool = False


def interpreters(version: str) -> Iterator[Path]:
    """Pythons of a version: on PATH, then pyenv's."""
    found = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(p) for p in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, found):
        asked = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if asked.stdout.strip() == version:  # a shim of pyenv may answer for nothing
            yield Path(path)


def constraints() -> Path:
    """The project's pins but those that hang on torch."""
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not OWN_PINS.match(line)]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / "constraints.txt"
    path.write_text("\n".join(kept) + "\n")
    return path


def install(python: Path, version: str, torch: str) -> tuple[Path | None, str]:
    """The environment of a pair, or why there is none."""
    environment = FOLDER / f"python{version}-torch{torch}"
    own, done = environment / "bin" / "python", environment / "installed"
    if done.exists():
        return own, ""
    shutil.rmtree(environment, ignore_errors=True)
    if shutil.disk_usage(FOLDER).free < ROOM_BYTES:
        return None, f"less than {ROOM_BYTES >> 30} GiB of disk are free"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pinned = ["--constraint", constraints()]
    for command in (
        [python, "-m", "venv", environment],
        [*pip, *pinned, f"torch=={torch}", "--editable", f"{ROOT}[dev]"],
    ):
        ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if ended.returncode:
            shutil.rmtree(environment, ignore_errors=True)
            said = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
            errors = [line for line in said if line.startswith("ERROR")]
            return None, (errors or said or ["pip failed"])[-1].removeprefix("ERROR: ")
    done.touch()
    return own, ""


def run(version: str, torch: str) -> Result:
    """One pair."""
    python = next(interpreters(version), None)
    if python is None:
        return Result(version, torch, f"no python{version} here")
    FOLDER.mkdir(exist_ok=True)
    own, why_not = install(python, version, torch)
    if own is None:
        return Result(version, torch, f"not installable: {why_not}")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{own.parent}{os.pathsep}{environment['PATH']}"
    ended = subprocess.run(
        [own, "-m", "pytest", "-m", "exactness", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    counted = [line for line in ended.stdout.splitlines() if re.search(r"\d+ (?:passed|failed|error)", line)]
    if ended.returncode:
        print(ended.stdout)
    said = counted[-1].strip("= ") if counted else f"pytest ended with {ended.returncode}"
    return Result(version, torch, said, ran=True, failed=ended.returncode != 0)


def main() -> int:
    """All pairs, or those that are asked for."""
    known = tomllib.loads((HERE / "versions.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=known["python"], help="versions of Python")
    parser.add_argument("--torch", nargs="*", default=known["torch"], help="releases of torch")
    asked = parser.parse_args()
    results = []
    for version in asked.python:
        for torch in asked.torch:
            results.append(run(version, torch))
            print(f"Python {version}, torch {torch}: {results[-1].said}", flush=True)
    print("\n| Python | torch | exactness suite |\n|---|---|---|")
    for result in results:
        print(f"| {result.python} | {result.torch} | {result.said} |")
    return int(any(r.failed for r in results) or not any(r.ran for r in results))


if __name__ == "__main__":
    sys.exit(main())
