"""Results are kept under the code that made them: whatever may change one changes its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stowage.stages.ir import code
from stowage.stages.ir.code import code_hash, versions_of

SOURCE = '"""Doubles."""\n\n\ndef double(x: int) -> int:\n    """Twice."""\n    return x + x  # exact\n'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hashed_package"
    (folder / "inside").mkdir(parents=True)
    for name in ("__init__.py", "inside/__init__.py"):
        (folder / name).write_text("")
    (folder / "inside" / "work.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("hashed_package")]:
        del sys.modules[name]


def hashes() -> tuple[str, str]:
    """Of the whole package: every byte, and what it does."""
    code.code_hash.cache_clear()
    return code_hash("hashed_package"), code_hash("hashed_package", words=False)


def test_every_byte_of_every_file_counts(package: Path) -> None:
    before = hashes()
    assert before == hashes()
    (package / "inside" / "more.py").write_text("X = 1\n")
    added = hashes()
    assert added[0] != before[0]
    assert added[1] != before[1]
    (package / "inside" / "more.py").rename(package / "inside" / "other.py")
    assert hashes()[0] not in (before[0], added[0])


def test_words_may_be_left_out(package: Path) -> None:
    work = package / "inside" / "work.py"
    before = hashes()
    work.write_text(SOURCE.replace("Doubles", "Makes twice as much").replace("Twice.", "2 x.").replace("exact", "fast"))
    words = hashes()
    assert words[0] != before[0]
    assert words[1] == before[1]
    work.write_text(SOURCE.replace("x + x", "x * 2"))
    assert hashes()[1] != before[1]


def test_one_module_alone(package: Path) -> None:
    code.code_hash.cache_clear()
    before = code_hash("hashed_package.inside.work")
    (package / "inside" / "more.py").write_text("X = 1\n")
    code.code_hash.cache_clear()
    assert code_hash("hashed_package.inside.work") == before
    with pytest.raises(ModuleNotFoundError, match=r"no module hashed_package\.inside\.missing"):
        code_hash("hashed_package.inside.missing")


def test_versions_of_what_is_installed() -> None:
    found = versions_of("numpy", "no-such-library-anywhere")
    assert len(found) == 1
    assert found[0].startswith("numpy ")
