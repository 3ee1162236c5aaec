"""Random changes of values, records, tables and bytes; among them strings that would run if anything took them for
code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq

CANARY = Path("/tmp/stowage-torture-ran")
"""Made by whatever runs a string that it should not run."""
_TOUCH = f"__import__('pathlib').Path('{CANARY}').touch()"
STRINGS = (
    "",
    "x",
    "\\",
    '"',
    "'",
    '"""',
    "a\nb",
    "a\n    import os\n",
    f'w" if not {_TOUCH} else "w',
    f'"]; {_TOUCH}; x = run.parameter["',
    f'"""\n{_TOUCH}\n"""',
    f"x\n{_TOUCH}\n#",
    f'float("{_TOUCH}")',
    f'cpu"); {_TOUCH} #',
    "../../../../tmp/stowage-torture-ran",
    "/tmp/stowage-torture-ran",
    "é🙂\u2028",
    "\x00",
    "[bold]x[/wrong]",
    "{x}",
    "%s%n",
    "$(touch /tmp/stowage-torture-ran)",
    "x" * 5000,
    "cpu",
    "50%",
    "1,5GiB",
    "900MiB/2",
    "1e308%",
    "999999PiB",
    "nan",
)
NUMBERS = (0, 1, -1, 2, 3, 1 << 31, 1 << 63, -(1 << 63), 10**30, 0.0, 0.5, -0.5, 1e308, float("nan"), float("inf"))
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [1, "a"], {"a": 1}, [[[]]], {"lr": {"x": 1}})


def value(rng: Random, like: Any = None) -> Any:
    """Some value; now and then close to what was there."""
    if isinstance(like, bool) and rng.random() < 0.3:
        return not like
    if isinstance(like, int | float) and not isinstance(like, bool) and rng.random() < 0.4:
        return rng.choice([like + 1, like - 1, -like, like * 2, type(like)(like / 2), str(like), float(like)])
    if isinstance(like, str) and like and rng.random() < 0.3:
        place = rng.randrange(len(like))
        return rng.choice([like[:place], like[place:], like[:place] + rng.choice(STRINGS) + like[place:], like.upper()])
    return rng.choice(rng.choice([STRINGS, NUMBERS, OTHERS]))


def mapping(rng: Random, content: dict[str, Any]) -> str:
    """Change something inside of nested mappings; what, in words."""
    place, path = content, ""
    while True:
        inner = [k for k, v in place.items() if isinstance(v, dict) and v]
        if not inner or rng.random() < 0.3:
            break
        key = rng.choice(inner)
        place, path = place[key], f"{path}{key}."
    keys = list(place)
    match rng.randrange(10):
        case 0 if keys:
            key = rng.choice(keys)
            del place[key]
            return f"without {path}{key}"
        case 1:
            key = rng.choice(STRINGS[1:8])
            place[key] = value(rng)
            return f"{path}{key!r} = {place[key]!r}"
        case 2 if keys:
            key, other = rng.choice(keys), rng.choice(keys)
            place[key], place[other] = place[other], place[key]
            return f"{path}{key} and {other} exchanged"
    if not keys:
        place["x"] = value(rng)
        return f"{path}x = {place['x']!r}"
    key = rng.choice(keys)
    place[key] = value(rng, place[key])
    return f"{path}{key} = {str(place[key])[:80]!r}"


def raw_bytes(rng: Random, path: Path) -> str:
    """Change the content of a file as disks and people do."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["flip", "cut", "empty", "remove", "append", "zeros", "noise", "folder"])
    if not content and how in ("flip", "cut", "zeros"):
        how = "append"
    if how == "flip":
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "empty":
        content.clear()
    elif how == "append":
        content += rng.randbytes(rng.choice([1, 100]))
    elif how == "zeros":
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice([1, 64, 4096]))
        content[start:end] = bytes(end - start)
    elif how == "noise":
        content = bytearray(rng.randbytes(rng.choice([1, 9, 500])))
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "remove":
        path.write_bytes(bytes(content))
    return f"{path.name}: {how}"


def record(rng: Random, path: Path) -> str:
    """Change a JSON record."""
    content = json.loads(path.read_text())
    what = mapping(rng, content)
    path.write_text(json.dumps(content))
    return f"{path.name}: {what}"


def table(rng: Random, path: Path, row_types: dict[str, type]) -> str:
    """Change a Parquet table by one value or row; half of the time with the hash of the result."""
    from stowage.stages.ir.table import read_rows, write_rows

    found = pq.read_table(path)
    row_type = row_types[(found.schema.metadata or {})[b"stowage.table"].decode()]
    if rng.random() < 0.5:
        rows = read_rows(path, row_type)
        how, changed = _changed_rows(rng, rows)
        try:
            write_rows(path, row_type, changed)
        except Exception:  # a value of another type than the column's
            return raw_bytes(rng, path)
        return f"{path.name}, with its hash: {how}"
    rows = found.to_pylist()
    if not rows:
        return raw_bytes(rng, path)
    position = rng.randrange(len(rows))
    match rng.randrange(3):
        case 0:
            del rows[position]
            how = f"without row {position}"
        case 1:
            rows.insert(position, rows[position])
            how = f"row {position} twice"
        case _:
            key = rng.choice(list(rows[position]))
            rows[position][key] = _alike(rng, rows[position][key])
            how = f"{key} of row {position} = {str(rows[position][key])[:60]!r}"
    try:
        pq.write_table(type(found).from_pylist(rows, schema=found.schema), path)
    except Exception:
        return raw_bytes(rng, path)
    return f"{path.name}, without its hash: {how}"


def _changed_rows(rng: Random, rows: list[Any]) -> tuple[str, list[Any]]:
    if not rows:
        return "nothing", rows
    position = rng.randrange(len(rows))
    match rng.randrange(4):
        case 0:
            return f"without row {position}", rows[:position] + rows[position + 1 :]
        case 1:
            return f"row {position} twice", [*rows[:position], rows[position], *rows[position:]]
    field = rng.choice(dataclasses.fields(rows[position])).name
    new = _alike(rng, getattr(rows[position], field))
    changed = dataclasses.replace(rows[position], **{field: new})
    return f"{field} of row {position} = {str(new)[:60]!r}", [*rows[:position], changed, *rows[position + 1 :]]


def _alike(rng: Random, old: Any) -> Any:
    """Another value of the same type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([old + 1, old - 1, -old, 0, -1, 1 << 40, 10**9])
    if isinstance(old, float):
        return rng.choice([old * 2, -old, 0.0, float("nan"), float("inf"), 1e300])
    if isinstance(old, str):
        new = value(rng, old)
        return new if isinstance(new, str) else rng.choice(STRINGS)
    if isinstance(old, list | tuple):
        items = list(old)
        if items and rng.random() < 0.7:
            place = rng.randrange(len(items))
            items[place] = _alike(rng, items[place])
        else:
            items = items[:-1] if items else [rng.choice([0, 1, 10**6])]
        return type(old)(items)
    if isinstance(old, bytes):
        return old[:-1] if old and rng.random() < 0.5 else old + b"\x01"
    return old


def source_text(rng: Random, path: Path, manifest: Path) -> str:
    """Change generated code; half of the time with its hash in the manifest."""
    lines = path.read_text().splitlines()
    place = rng.randrange(len(lines))
    indent = "    " if lines[place].startswith("    ") else ""
    line = rng.choice(
        [
            f"{indent}{_TOUCH}",
            f"{indent}x = eval({_TOUCH!r})",
            f"{indent}import os; os.system('touch {CANARY}')",
            f"{indent}x = torch.load('{CANARY}')",
            f"{indent}x = aten.from_file.default('{CANARY}', True, 8)",
            f"{indent}run.update.__globals__",
            f"{indent}del run",
            f"{indent}return",
            rng.choice(STRINGS),
        ]
    )
    how = rng.choice(["insert", "replace", "remove"])
    if how == "insert":
        lines.insert(place, line)
    elif how == "replace":
        lines[place] = line
    else:
        del lines[place]
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    if rng.random() < 0.5:
        content = json.loads(manifest.read_text())
        content["source_hash"] = hashlib.sha256(text.encode()).hexdigest()
        manifest.write_text(json.dumps(content))
        how += ", with its hash"
    return f"line {place + 1} of {path.name}: {how} {line[:60]!r}"
