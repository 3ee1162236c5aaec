"""Names calls and tables by their content."""

from __future__ import annotations

import hashlib
import re

from stowage.stages.ir.trace import Value


def call_signature(target: str, encoded: str, values: list[Value]) -> str:
    """Return operator and arguments as text, every tensor by its form.

    See `Call.signature`, and `without_numbers` for what is left out.
    """

    def describe(match: re.Match[str]) -> str:
        return f'"{values[int(match.group(1))].form}"'

    return target + re.sub(r'\{"value":(\d+)\}', describe, encoded)


def content_hash(*parts: str) -> str:
    """Return a short hash of text."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
