"""Pages are as long as they may be, lead where they say, are all in the site, and have every equation."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from stowage.flows.benchmark import application
from stowage.stages.formulations.block import checkmate
from stowage.stages.formulations.block.rk_checkmate import model as rk_checkmate
from stowage.stages.formulations.cluster.h_ilp import equations as h_ilp
from stowage.stages.formulations.cuts import equations as cuts
from stowage.stages.formulations.offload.o_ilp import equations as o_ilp
from stowage.stages.formulations.sharding.four_states import equations as four_states
from tests.documents.known_names import is_module
from tests.documents.markdown_pages import PAGES, ROOT, anchors_of, prose_of, text_of

LONGEST = {"README.md": 150, "CONTRIBUTING.md": 100}


@pytest.mark.parametrize("page", LONGEST)
def test_front_pages_are_short(page: str) -> None:
    assert len(text_of(page).splitlines()) <= LONGEST[page]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and anchor not in anchors_of(str(there.resolve().relative_to(ROOT)))):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_as_many_cells_in_each_row(page: str) -> None:
    """A row of dashes that is too short makes the whole table running text."""

    def cells(line: str) -> int:
        return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`|\$[^$]*\$", "", line)))

    wrong = []
    for table in re.findall(r"(?:^ *\|.*\|$\n?)+", prose_of(page), re.MULTILINE):
        head, *rows = table.strip().split("\n")
        dashes = bool(rows) and re.fullmatch(r" *\|(:?-+:?\|)+", rows[0].replace(" ", ""))
        wrong += [head] if not dashes else [row for row in rows if cells(row) != cells(head)]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"^::: ", text_of(page), re.MULTILINE)])
def test_what_is_taken_from_docstrings_is_there(page: str) -> None:
    missing = []
    for name in re.findall(r"^::: ([\w.]+)$", text_of(page), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        if not is_module(name) and not (is_module(module) and hasattr(importlib.import_module(module), attribute)):
            missing.append(name)
    assert missing == []


def test_the_site_has_every_page() -> None:
    class Loader(yaml.SafeLoader):
        """Reads `mkdocs.yml`, whose tags name functions of mkdocs."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [page for item in inner for page in pages(item)]  # type: ignore[attr-defined]

    assert sorted(pages(nav)) == sorted(
        str(Path(page).relative_to("docs")) for page in PAGES if page.startswith("docs/")
    )


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("checkmate", checkmate.EQUATIONS),
        ("rk_checkmate", rk_checkmate.EQUATIONS),
        ("h_ilp", h_ilp.EQUATIONS),
        ("o_ilp", o_ilp.EQUATIONS),
        ("cuts", cuts.EQUATIONS),
        ("four_states", four_states.EQUATIONS),
    ],
)
def test_the_page_of_a_formulation_has_its_equations(page: str, numbers: dict[str, object]) -> None:
    text = text_of(f"docs/design/formulations/{page}.md")
    rows = set(re.findall(r"^\| ([\dC.]+) \|", text, re.MULTILINE)) | set(re.findall(r"`(\w+)`", text))
    assert sorted(set(numbers) - rows) == []


def test_every_benchmark_is_in_the_table_of_commands() -> None:
    text = (ROOT / "docs" / "guide" / "commands.md").read_text()
    names = {command.name or command.callback.__name__ for command in application.registered_commands}  # type: ignore[union-attr]
    assert len(names) > 10
    assert not [name for name in sorted(names) if f"`{name}`" not in text and f"`{name} " not in text]
