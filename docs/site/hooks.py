"""Makes the site stand alone: formulas are MathML, drawn without a script, and no script is another host's."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.utils import get_relative_url

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What mkdocs-material loads, where pages are opened as files, for the search."""
OWN_SHIM = "site/iframe-worker.js"


def on_page_content(content: str, **_: Any) -> str:
    """Replace what `pymdownx.arithmatex` marked as formulas; mkdocs calls this for every page."""
    return FORMULA.sub(_drawn, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the script of the search from the site; mkdocs calls this for every page."""
    return output.replace(SHIM, get_relative_url(OWN_SHIM, page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page of what is not found; mkdocs calls this for every template."""
    return output_content.replace(SHIM, OWN_SHIM)


def _drawn(found: re.Match[str]) -> str:
    block = found[1] == "div"
    mathml = convert(html.unescape(found[2]).strip(), display="block" if block else "inline")
    mathml = mathml.replace("<mi>&#x02032;</mi>", '<mo class="prime">&#x02032;</mo>')  # else it is drawn as a dot
    return f'<div class="formula">{mathml}</div>' if block else mathml
