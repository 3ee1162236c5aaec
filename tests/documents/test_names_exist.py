"""Every file, module, function, option and parameter that a document names in backticks exists."""

from __future__ import annotations

import builtins
import importlib
import re
from keyword import iskeyword

import pytest

from stowage.flows.starter.templates import WORKFLOW
from stowage.stages.ir.code_record import RECORD
from tests.documents import known_names
from tests.documents.markdown_pages import PAGES, ROOT, blocks_of, names_of, prose_of

GENERATED = {"step.py", "my_model.py", WORKFLOW, str(RECORD)}
"""Files that a run, a user or `stowage init` makes."""

ELSEWHERE = {
    "fastapi", "_s", "functional_call", "add_cumulative", "on_pre_optimizer_step",
}  # fmt: skip
"""Names of other projects that no module here mentions."""

PYTHON = re.compile(r"^[\w.]+$")
PATH = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")


def missing(name: str) -> str | None:
    """Say what is wrong with a name; None if it is there, or is no name."""
    if test := re.fullmatch(r"([\w/]+\.py)::(\w+)", name):
        path = ROOT / "tests" / test[1]
        there = path.exists() and re.search(rf"^def {test[2]}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        return None if there else "no such test"
    if command := re.match(r"python -m (stowage[\w.]*)(.*)", name):
        wrong = [o for o in re.findall(r"--[a-z][\w-]*", command[2]) if o not in known_names.options()]
        return None if known_names.is_module(command[1]) and not wrong else f"no such command or option {wrong}"
    if program := re.fullmatch(r"stowage ([a-z][\w-]*)( .*)?", name):
        wrong = [o for o in re.findall(r"--[a-z][\w-]*", program[2] or "") if o not in known_names.options()]
        return None if program[1] in known_names.commands() and not wrong else f"no such command or option {wrong}"
    if target := re.fullmatch(r"make ([a-z][\w-]*)( [A-Z]+=\S+)*", name):
        return None if target[1] in known_names.targets() else "no such target"
    if re.fullmatch(r"--[a-z][\w-]*( [\w|]+)?", name):
        return None if name.split()[0] in known_names.options() else "no such option"
    if PATH.fullmatch(name) and (
        "/" in name or name in known_names.files() or name.endswith((".py", ".md", ".yaml", ".yml", ".toml"))
    ):
        return None if _is_there(name.rstrip("/")) else "no such file"
    if call := re.fullmatch(r"([\w.]+)\(.*\)", name):
        name = call[1]
    if PYTHON.fullmatch(name) and not name[0].isdigit():
        return None if _is_known(name) else "no such name"
    return None


def _is_there(path: str) -> bool:
    if path in known_names.files() or path in GENERATED:
        return True
    if "/" not in path:
        return any(file.rpartition("/")[2] == path for file in known_names.files())
    return path.startswith(("artifacts/", ".stowage", "build/", "first/", "race/")) and _is_made(path)


def _is_made(path: str) -> bool:
    """Tell whether code, `dvc.yaml` or the Makefile speaks of the last part of a path that only a run makes."""
    last = path.rpartition("/")[2]
    made = (ROOT / "dvc.yaml").read_text() + (ROOT / "Makefile").read_text() + (ROOT / "mkdocs.yml").read_text()
    return last in known_names.identifiers() or last in made or last in known_names.files() or last.isupper()


def _is_known(name: str) -> bool:
    if name in known_names.parameters() or name in known_names.targets() or name in ELSEWHERE or iskeyword(name):
        return True
    if name.startswith("stowage.") and known_names.is_module(name):
        return True
    if name in known_names.identifiers() or hasattr(builtins, name):
        return True
    parts = name.strip(".").split(".")
    if all(part in known_names.identifiers() for part in parts[-2:]):
        return True
    return _is_outside(name)


def _is_outside(name: str) -> bool:
    """Tell whether a dotted name is an attribute of torch, its `nn`, or another module."""
    for prefix in ("", "torch.", "torch.nn."):
        parts = (prefix + name).strip(".").split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            for part in parts[cut:]:
                value = getattr(value, part, None)
            if value is not None:
                return True
            break
    return False


@pytest.mark.parametrize("page", PAGES)
def test_every_name_in_backticks_exists(page: str) -> None:
    found = {name: wrong for name in names_of(page) if (wrong := missing(name))}
    assert found == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_in_a_block_exists(page: str) -> None:
    lines = [line.split("  #")[0].strip() for block in blocks_of(page) for line in block.body.split("\n")]
    commands = [line for line in lines if re.match(r"(python -m stowage|stowage |make )", line)]
    found = {line: wrong for line in commands if (wrong := missing(re.sub(r" && .*", "", line)))}
    assert found == {}


@pytest.mark.parametrize("page", PAGES)
def test_a_name_is_in_the_file_that_is_said_to_have_it(page: str) -> None:
    """`name` (`file`) and `name` in `file` are true."""
    wrong = []
    for name, path in re.findall(r"`([\w.]+)`(?: \(|\s+in\s+)`([\w/]+\.py)`", prose_of(page)):
        last = re.escape(name.rpartition(".")[2])
        made = rf"^\s*(?:class |def |self\.)?{last}\b\s*[:=(\[]|[\"']{last}[\"']|^\s*(?:class |def ){last}\b"
        if "/" in path and not re.search(made, (ROOT / path).read_text("utf-8"), re.MULTILINE):
            wrong.append(f"{name} in {path}")
    assert wrong == []


def test_a_name_that_is_not_there_is_found() -> None:
    for name in (
        "stages/solve/race.py", "no_such_file.py", "api/test_zoo.py::test_no", "make nothing",
        "python -m stowage.flows.nothing", "python -m stowage.flows.plan --nothing", "--nothing-like-it",
        "stowage no-such-command", "solve.device_bugdet", "NoSuchName", "no_such_name()",
    ):  # fmt: skip
        assert missing(name), name
