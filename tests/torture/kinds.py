"""Kinds of cases: each makes a copy of a project, disturbs it, and judges how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import yaml

from tests.ir.row_types import TABLES
from tests.torture import forks, judge, mutations, projects
from tests.torture.forks import UNDISTURBED, Disturbance, Ended
from tests.torture.projects import PLANNING, PRODUCTS, STAGES, Project

DISK_BYTES = 256 << 20
ROWS = {row_type.__name__: row_type for row_type in TABLES}


@dataclass(frozen=True)
class Case:
    """What was done, and what is wrong with how it ended; "" for nothing."""

    what: str
    fault: str
    ended: Ended | None = None


@dataclass
class Place:
    """Where cases work.

    Attributes:
        base: of everything; each case has a folder of its own below it, which goes away.
        plain, own, offloading: projects.
    """

    base: Path
    plain: Project
    own: Project
    offloading: Project
    count: int = 0
    fit_reference: list[float] = field(default_factory=list)

    def fresh(self) -> Path:
        """A folder that does not exist yet."""
        self.count += 1
        return self.placement / f"case{self.count}"

    def run(self, folder: Path, *names: str, disturbance: Disturbance = UNDISTURBED) -> Ended:
        """Stages in a copy."""
        return forks.run(projects.stages(*names), folder, disturbance)


Kind = Callable[[Place, Random], Case]


def _judged(folder: Path, what: str, ended: Ended, like: Project | None) -> Case:
    """A failure must be a sentence; a success must have the bits of `like`, or plain PyTorch's where inputs are other
    ones."""
    fault = judge.fault(ended) or judge.left(folder)
    if not fault and ended.code == 0:
        fault = like.same_end(folder) if like is not None else ""
        if like is None and projects.losses_equal(folder) is False:
            fault = "other losses than plain PyTorch, and exit status 0"
    return Case(what, fault, ended)


def parameters(place: Place, rng: Random) -> Case:
    """Every key of params.yaml."""
    project = rng.choice([place.plain, place.plain, place.own])
    folder = project.copy(place.fresh(), without=STAGES)
    path = folder / "params.yaml"
    if rng.random() < 0.15:
        what = mutations.raw_bytes(rng, path)
    else:
        content = yaml.safe_load(path.read_text())
        what = "; ".join(mutations.mapping(rng, content) for _ in range(rng.choice([1, 1, 2])))
        if rng.random() < 0.3:
            path.write_text(json.dumps(content))
        else:
            try:
                path.write_text(yaml.safe_dump(content, sort_keys=False))
            except (yaml.YAMLError, ValueError):
                path.write_text(json.dumps(content))
    return _judged(folder, what, place.run(folder, *STAGES), None)


def artifacts(place: Place, rng: Random) -> Case:
    """What one stage has written, and another reads."""
    project = rng.choice([place.plain, place.own])
    folder = project.copy(place.fresh(), without=("train",))
    stage = rng.choice([*PRODUCTS, "codegen", "codegen"])
    files = sorted(p for p in (folder / "artifacts" / stage).rglob("*") if p.is_file())
    path = rng.choice(files)
    draw = rng.random()
    if path.suffix == ".py" and draw < 0.8:
        what = mutations.source_text(rng, path, path.with_name("manifest.json"))
    elif path.suffix == ".json" and draw < 0.8:
        what = mutations.record(rng, path)
    elif path.suffix == ".parquet" and draw < 0.7:
        what = mutations.table(rng, path, ROWS)
    elif draw < 0.85:
        other = rng.choice(sorted(p for p in (folder / "artifacts").rglob("*") if p.is_file()))
        shutil.copyfile(other, path) if other != path else None
        what = f"{path.name} replaced by {other.name}"
    else:
        what = mutations.raw_bytes(rng, path)
    later = STAGES[STAGES.index(stage) + 1 :]
    return _judged(folder, f"{stage}: {what}", place.run(folder, *later), project)


def device(place: Place, rng: Random) -> Case:
    """The target's description."""
    folder = place.plain.copy(place.fresh(), without=STAGES)
    path = folder / "artifacts" / "device.json"
    what = mutations.raw_bytes(rng, path) if rng.random() < 0.2 else mutations.record(rng, path)
    return _judged(folder, what, place.run(folder, *STAGES), None)


def _stored(place: Place, rng: Random, store: str, first: str) -> Case:
    folder = place.plain.copy(place.fresh(), without=STAGES[STAGES.index(first) :])
    files = sorted(p for p in (folder / ".stowage" / store).rglob("*.parquet"))
    path = rng.choice(files)
    if rng.random() < 0.7:
        what = mutations.table(rng, path, ROWS)
    elif rng.random() < 0.3:
        other = rng.choice(files)
        shutil.copyfile(other, path) if other != path else None
        what = f"{path.name} replaced by another"
    else:
        what = mutations.raw_bytes(rng, path)
    names = STAGES[STAGES.index(first) :]
    return _judged(folder, what, place.run(folder, *names), None)


def costs(place: Place, rng: Random) -> Case:
    """Stored costs, and what calls return."""
    return _stored(place, rng, "costs", "profile")


def options(place: Place, rng: Random) -> Case:
    """Stored schedules of blocks."""
    return _stored(place, rng, "options", "options")


def checkpoints(place: Place, rng: Random) -> Case:
    """What a killed run goes on from."""
    project = rng.choice([place.plain, place.plain, place.offloading])
    folder = project.copy(place.fresh(), without=("train",))
    ended = place.run(folder, "train", disturbance=Disturbance(signal.SIGKILL, project.took_s["train"] * 0.8))
    found = sorted((folder / ".stowage" / "checkpoints").rglob("*.safetensors"))
    if not found:
        return Case("killed before the first checkpoint", project.same_end(folder) if ended.code == 0 else "", ended)
    judge.forget(folder)  # what the killed run was writing goes with its next write
    path = rng.choice(found)
    what = mutations.raw_bytes(rng, path) if rng.random() < 0.7 else _metadata(rng, path)
    return _judged(folder, what, place.run(folder, "train"), project)


def _metadata(rng: Random, path: Path) -> str:
    """Change what stands before the tensors, keeping the file whole."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    what = mutations.mapping(rng, header)
    if rng.random() < 0.5:
        metadata = header.get("__metadata__")
        if isinstance(metadata, dict):
            metadata.pop("stowage.digest", None)
        what += ", without its hash"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return f"metadata: {what}"


def sources(place: Place, rng: Random) -> Case:
    """Text and code of the user's."""
    project = rng.choice([place.plain, place.own, place.own])
    names = ["text.txt"] if project is place.plain else ["my_model.py", "helper.py"]
    folder = project.copy(place.fresh(), without=STAGES)
    path = folder / rng.choice([*names, "artifacts/inputs.yaml"])
    if path.name == "inputs.yaml":
        content = {"trace": ["helper.py", "my_model.py"], "train": ["text.txt"]}
        what = mutations.mapping(rng, content)
        path.write_text(json.dumps(content) if rng.random() < 0.7 else rng.choice(mutations.STRINGS))
    elif rng.random() < 0.5:
        what = mutations.raw_bytes(rng, path)
    else:
        lines = path.read_text().splitlines() or [""]
        place_ = rng.randrange(len(lines))
        lines[place_] = rng.choice(["raise ValueError", "import sys; sys.exit(0)", "", "def (", "import nothing_here"])
        path.write_text("\n".join(lines))
        what = f"{path.name}, line {place_ + 1}: {lines[place_]!r}"
    first = place.run(folder, "trace")
    if first.code == 1 and "run the same command again" in first.said:  # a file that is gone was listed
        first = place.run(folder, "trace")
    if first.code:
        return _judged(folder, what, first, None)
    return _judged(folder, what, place.run(folder, *STAGES[1:]), None)


def budgets(place: Place, rng: Random) -> Case:
    """Sizes and percentages."""
    folder = place.plain.copy(place.fresh(), without=("solve", "codegen", "train"))
    path = folder / "params.yaml"
    content = yaml.safe_load(path.read_text())
    key = rng.choice(["device_budget", "device_budget", "disk_budget"])
    content["solve"][key] = text = _size(rng)
    if key == "disk_budget":
        content["solve"]["offload_dir"] = ".stowage/lower_tier"
    path.write_text(yaml.safe_dump(content))
    return _judged(folder, f"{key} = {text!r}", place.run(folder, "solve", "codegen", "train"), None)


def _size(rng: Random) -> str | int | float:
    number = rng.choice(
        ["0", "1", "12", "1.5", "1,5", ".5", "1e3", "-3", "0x10", "9" * 30, "1_000", "50", "150", "99.9"]
    )
    unit = rng.choice(["", "B", "KiB", "MiB", "GiB", "MB", "%", " %", "PiB", "EiB", "MiBs", "/2", "%%", "kb", "mib "])
    space = rng.choice(["", "", " ", "\t"])
    return rng.choice([number + space + unit] * 4 + [rng.choice([0, -1, 1, 10**6, 10**30, 1.5, True])])  # type: ignore[list-item]


def kills(place: Place, rng: Random) -> Case:
    """`kill -9` at some moment of some stage, then once more from there to the end."""
    project = rng.choice([place.plain, place.own, place.offloading])
    stage = rng.choice([*STAGES, "train", "train"])
    first = STAGES.index(stage)
    folder = project.copy(place.fresh(), without=STAGES[first:])
    after_s = rng.random() * project.took_s[stage]
    what = f"{stage} killed after {after_s:.2f} s"
    ended = place.run(folder, stage, disturbance=Disturbance(signal.SIGKILL, after_s))
    if ended.code not in (0, -signal.SIGKILL):
        return Case(what, judge.fault(ended), ended)
    again = place.run(folder, *STAGES[first:])
    if again.code:
        return Case(what, judge.fault(again) or f"the next run failed: {again.said.strip().splitlines()[-1]}", again)
    return _judged(folder, what, again, project)


def interrupts(place: Place, rng: Random) -> Case:
    """Ctrl-C at some moment of some stage, then once more from there to the end."""
    project = rng.choice([place.plain, place.own])
    stage = rng.choice([*STAGES, "train", "train"])
    first = STAGES.index(stage)
    folder = project.copy(place.fresh(), without=STAGES[first:])
    after_s = rng.random() * project.took_s[stage]
    what = f"{stage} interrupted after {after_s:.2f} s"
    ended = place.run(folder, stage, disturbance=Disturbance(signal.SIGINT, after_s))
    before_it_began = ended.said.rstrip().endswith("KeyboardInterrupt") and "in run_stage" not in ended.said
    if ended.code not in (0, 130) and not before_it_began:  # while Python imports, it is Python's to say
        return Case(what, f"exit status {ended.code}", ended)
    if "Traceback" in ended.said and not before_it_began:
        return Case(what, "a traceback", ended)
    if fault := judge.left(folder):
        return Case(what, fault, ended)
    again = place.run(folder, *STAGES[first:])
    fault = f"the next run failed: {again.said.strip()[-300:]}" if again.code else ""
    return Case(what, fault, again) if fault else _judged(folder, what, again, project)


def full_disks(place: Place, rng: Random) -> Case:
    """No file may grow beyond some size, or a disk has so much room left, in one stage; then there is room again."""
    project = rng.choice([place.plain, place.own, place.offloading])
    stage = rng.choice([*STAGES, "train"])
    first = STAGES.index(stage)
    room = int(2 ** (rng.random() * 24))
    with small_disk(place.fresh()) if rng.random() < 0.5 else contextlib.nullcontext() as disk:
        folder = project.copy((disk or place.fresh()) / "project", without=STAGES[first:])
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        if disk is None:
            what = f"{stage} with files of at most {room} bytes"
            ended = place.run(folder, stage, disturbance=Disturbance(file_bytes=room))
        else:
            what = f"{stage} with {room} bytes free"
            with _filled(disk, room):
                ended = place.run(folder, stage)
        if fault := judge.fault(ended) or judge.left(folder):
            return Case(what, fault, ended)
        lost = [p.name for p, content in before.items() if not p.is_file() or len(p.read_bytes()) < len(content)]
        if lost:
            return Case(what, f"lost or cut: {lost[0]}", ended)
        again = place.run(folder, *STAGES[first:])
        if again.code:
            return Case(what, f"the next run failed: {again.said.strip()[-300:]}", again)
        return _judged(folder, what, again, project)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own in memory, for those who may mount one; else None."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def _filled(disk: Path, room: int) -> Iterator[None]:
    """Leave so many bytes of it."""
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - room))
    try:
        yield
    finally:
        ballast.unlink()


def at_once(place: Place, rng: Random) -> Case:
    """Two runs of the same stages in one project."""
    import threading

    project = rng.choice([place.plain, place.own])
    first = rng.randrange(len(PLANNING))
    folder = project.copy(place.fresh(), without=STAGES[first:])
    other: list[Ended] = []
    thread = threading.Thread(target=lambda: other.append(forks.run(projects.stages(*STAGES[first:]), folder)))
    thread.start()
    mine = place.run(folder, *STAGES[first:])
    thread.join()
    what = f"two runs from {STAGES[first]} on"
    for ended in (mine, *other):
        if fault := judge.fault(ended):
            return Case(what, fault, ended)
    return _judged(folder, what, mine, project if mine.code == 0 else None)
