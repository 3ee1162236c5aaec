"""The documents of the repository, and what stands in them: code blocks, names in backticks, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- test: (?P<what>\w+)(?: (?P<why>[^>]*))? -->\n$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language and text, and what the mark right before it says of testing."""

    language: str
    body: str
    line: int
    mark: str
    why: str


def text_of(page: str) -> str:
    """Read one page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Find the fenced blocks of one page."""
    text = text_of(page)
    found = []
    for fence in FENCE.finditer(text):
        mark = MARK.search(text[: fence.start()])
        line = text[: fence.start()].count("\n") + 2
        what, why = (mark["what"], mark["why"] or "") if mark else ("", "")
        found.append(Block(fence["language"], fence["body"], line, what, why))
    return found


def prose_of(page: str) -> str:
    """Read one page without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", text_of(page)), flags=re.DOTALL)


def names_of(page: str) -> list[str]:
    """List what stands in backticks on one page, each once."""
    return sorted(set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))))


def anchors_of(page: str) -> set[str]:
    """List the anchors of a page's headings, as GitHub and mkdocs both make them."""
    headings = re.findall(r"^#{1,6} (.+?)(?: \{.*\})?$", FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in plain}
