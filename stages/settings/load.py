"""Reads `Settings` from YAML, and turns whatever is wrong in it into one sentence."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stowage.stages.ir.errors import ParameterError
from stowage.stages.settings.models import Settings

_ALIKE = 0.8
"""Similarity from which a section's name counts as one of ours misspelled: `sovle` does, `training` does not."""
_DEPTH, _ITEMS = 40, 100_000
"""Depth and number of items that parameters may have: an alias that repeats itself has more."""


def load_settings(path: Path = Path("params.yaml")) -> Settings:
    """Read and check a parameter file.

    Raises:
        ParameterError: the file is missing or is not YAML, a key is unknown or missing, or a value is wrong.
    """
    return parse_settings(read_parameters(path), str(path))


def read_parameters(path: Path) -> dict[str, Any]:
    """Read the file's content without any check of keys.

    Raises:
        ParameterError: the file is missing, is not YAML, or is not a mapping.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ParameterError(
            f"{path} is missing: run in the folder that has it, or restore it with `git checkout`."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read ({error}): make it a readable UTF-8 text file.") from error
    if not isinstance(content, dict):
        raise ParameterError(f"{path} must be a mapping of sections such as trace and solve, and is {_kind(content)}.")
    return content


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML value as DVC reads its parameters.

    Raises:
        ParameterError: it is not YAML.
    """
    try:
        content = YAML(typ="safe").load(text)
    except YAMLError as error:
        raise ParameterError(f"{source} is not valid YAML: {_yaml_problem(error)}.") from error
    except Exception as error:  # raised for values that look like dates, numbers or sets and are none
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ParameterError(f"{source} is not valid YAML: {reason}; put what is meant as text in quotes.") from error
    if problem := _not_plain(content):
        raise ParameterError(f"{source} {problem}.")
    return content


def _not_plain(content: Any) -> str | None:
    """Return what is wrong with the content, unless it is made of a few mappings, lists, texts and numbers."""
    waiting, items = [(content, "", 0)], 0
    while waiting:
        item, key, depth = waiting.pop()
        items += 1
        if depth > _DEPTH or items > _ITEMS:
            return (
                f"nests too deep or repeats itself below {_name(key.split('.')[0]) or 'its top'}: write its values out"
            )
        if isinstance(item, dict):
            for name, value in item.items():
                if not isinstance(name, str):
                    return f"has the key {name!r} in {_name(key) or 'its top'}, which is no text: put it in quotes"
                waiting.append((value, f"{key}.{name}" if key else name, depth + 1))
        elif isinstance(item, list):
            waiting += [(value, key, depth + 1) for value in item]
        elif not (item is None or isinstance(item, bool | int | float | str)):
            where = _name(key) or "its top"
            return f"has a {type(item).__name__} in {where}: put it in quotes, or write a number or a list"
    return None


def parse_settings(content: Mapping[str, Any], source: str = "the parameters") -> Settings:
    """Check parameters that are already in memory; `source` names them in messages.

    Other tools may have sections in the same file, which are ignored: a section with an unknown name is refused only if
    the name looks like one of ours misspelled.

    Raises:
        ParameterError: a key is unknown or missing, or a value is wrong.
    """
    try:
        return Settings.model_validate({name: value for name, value in content.items() if not _of_others(name)})
    except ValidationError as error:
        found = error.errors(include_url=False)
        more = f" ({len(found) - 1} more to mend after that)" if len(found) > 1 else ""
        raise ParameterError(f"{source}: {_sentence(found[0])}{more}.") from error


def _of_others(name: object) -> bool:
    """Return whether a section is another tool's, and not one of ours misspelled."""
    known = Settings.model_fields
    return isinstance(name, str) and name not in known and not difflib.get_close_matches(name, known, 1, _ALIKE)


def _sentence(error: Mapping[str, Any]) -> str:
    location, value = error["loc"], error["input"]
    key = _name(".".join(str(part) for part in location)) or "the file"
    match error["type"]:
        case "extra_forbidden":
            return f"{key} is not a known key; {_suggestion(location)}"
        case "missing":
            return f"{key} is missing; add it"
        case "value_error":
            return f"{key}: {error['ctx']['error']}"
        case "model_type" | "model_attributes_type":
            return f"{key} must be a section with keys of its own, and is {_kind(value)}; indent its keys below it"
        case _:
            wanted = str(error["msg"]).removeprefix("Input should be ")
            return f"{key} must be {wanted}, and is {_kind(value)}; correct the value"


def _name(text: str) -> str:
    """Return a key on one line, shortened if it is too long."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."


def _suggestion(location: Sequence[str | int]) -> str:
    prefix = [str(part) for part in location[:-1]]
    known = [".".join([*prefix, name]) for name in _section_at(prefix).model_fields]
    unknown = str(location[-1])
    matches = difflib.get_close_matches(unknown, [name.rpartition(".")[2] for name in known], n=1)
    if matches:
        return f"rename it to {'.'.join([*prefix, matches[0]])}"
    return f"remove it, or use one of {', '.join(known)}"


def _section_at(prefix: Sequence[str]) -> type[BaseModel]:
    section: type[BaseModel] = Settings
    for part in prefix:
        field = section.model_fields.get(part)
        section = _model_in(field.annotation) if field else section
    return section


def _model_in(annotation: Any) -> type[BaseModel]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel))
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        raise TypeError(f"{annotation!r} is not a section")
    return annotation


_SHOWN = 60


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return f"{text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'} ({type(value).__name__})"


def _yaml_problem(error: YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    where = f" on line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{' '.join(str(problem).split())}{where}; mend that line"
