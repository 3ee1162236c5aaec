"""Turns formulas into MathML while the site is built, so that browsers draw them without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace what `pymdownx.arithmatex` marked; mkdocs calls this for every page."""
    return FORMULA.sub(_drawn, content)


def _drawn(found: re.Match[str]) -> str:
    block = found[1] == "div"
    mathml = convert(html.unescape(found[2]).strip(), display="block" if block else "inline")
    return f'<div class="formula">{mathml}</div>' if block else mathml
