"""The code of README and guides runs as it stands there, page by page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.markdown_pages import PAGES, ROOT, blocks_of

PYTHON = {page: [b for b in blocks_of(page) if b.language == "python"] for page in PAGES}


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if any(b.mark == "run" for b in blocks)])
def test_code_runs(page: str, tmp_path: Path, fit_stores: Path) -> None:
    code = "".join("\n" * 2 + block.body for block in PYTHON[page] if block.mark in ("setup", "run"))
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    environment = os.environ | {"STOWAGE_HOME": str(fit_stores / "quick"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if blocks])
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    unmarked = [b.line for b in PYTHON[page] if b.mark not in ("setup", "run") and not (b.mark == "skip" and b.why)]
    assert unmarked == []


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if blocks])
def test_every_block_is_python(page: str) -> None:
    for block in PYTHON[page]:
        compile(block.body, f"{page}:{block.line}", "exec")


def test_readme_and_guides_have_code_that_runs() -> None:
    running = {page for page, blocks in PYTHON.items() if any(b.mark == "run" for b in blocks)}
    assert {"README.md", "docs/guide/fit.md", "docs/guide/offloading.md", "docs/guide/batch_size.md"} <= running
    assert (ROOT / "README.md").exists()
