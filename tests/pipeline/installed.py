"""The wheel, installed into an environment of its own, where no checkout is on the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline_projects import IDENTITY, ROOT

QUIET = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "OMP_NUM_THREADS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
PROGRAMS = ("dvc", "prefect")


def copy_of_the_tree(folder: Path) -> Path:
    """What Git lists of this checkout, edits and new files included, without its tests."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "artifacts/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(tree: Path, kind: str, out: Path) -> Path:
    """Build `sdist` or `wheel` of a tree with the setuptools that is here."""
    out.mkdir(parents=True, exist_ok=True)
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel; other packages are those of the tests' own environment.

    Attributes:
        folder: of the environment.
        wheel: what is installed.
    """

    folder: Path
    wheel: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def package(self) -> Path:
        """Where `stowage` is."""
        return self.folder / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages" / "stowage"

    def environment(self, **more: str) -> dict[str, str]:
        """Of its processes: nothing of this checkout is on a path."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = os.pathsep.join([str(self.folder / "bin"), kept.get("PATH", os.defpath)])
        return {**kept, **QUIET, **IDENTITY, "PATH": path, **more}

    def start(self, command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command; it may fail."""
        return subprocess.run(
            command, cwd=folder, env=self.environment(**more), capture_output=True, text=True, check=False
        )

    def run(self, command: list[str], folder: Path, **more: str) -> str:
        """What a command prints that must succeed."""
        done = self.start(command, folder, **more)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def install(folder: Path, wheel: Path, without: tuple[str, ...] = ()) -> Installed:
    """An environment with a wheel.

    Args:
        folder: where to make it.
        wheel: of `build`.
        without: packages of the tests' own environment that it does not have.
    """
    made = Installed(folder / "environment", wheel)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.folder)], check=True)
    shared = Path(next(path for path in sys.path if path.endswith("site-packages")))
    if without:
        some = folder / "some"
        some.mkdir()
        for entry in shared.iterdir():
            if not entry.name.startswith(without):
                (some / entry.name).symlink_to(entry)
        shared = some
    # A line of a .pth file is a folder; the .pth files in that folder are not read, so no editable install is seen.
    (made.package.parent / "shared.pth").write_text(f"{shared}\n")
    pip = [sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
    for name in PROGRAMS:
        program = made.folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {made.python} -m {name} "$@"\n')
        program.chmod(0o755)
    return made
