"""Joins the text of an existing file with the text that is wanted: what people wrote stays."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.util import load_yaml_guess_indent

from stowage.stages.ir.errors import StowageError

_OURS = ("cmd", "desc")
"""Keys of a stage that Stowage writes alone; the lists of a stage are joined with what people added to them."""
_LISTS = ("deps", "params", "outs", "metrics", "plots")
_FOLDERS_OF_CODE = re.compile(r"(stages|flows)/[\w/.]+")
"""Matches deps of a checkout of Stowage, which a project elsewhere does not have."""


def with_lines(text: str, wanted: str) -> str:
    """Return `text` with those lines of `wanted` that it lacks, for files of patterns to ignore."""
    there = {line.strip().strip("/") for line in text.splitlines()}
    missing = [line for line in wanted.splitlines() if line.strip().strip("/") not in there]
    if not missing:
        return text
    return "\n".join([*([text.rstrip("\n")] if text.strip() else []), *missing]) + "\n"


def with_sections(text: str, wanted: str, path: str) -> str:
    """Return `params.yaml` with those sections of `wanted` that it lacks, comments included."""
    there = _load(text, path)[0]
    sections = re.split(r"\n(?=\w+:)", wanted.rstrip("\n"))
    missing = [part.strip("\n") for part in sections if (m := re.match(r"(\w+):", part)) and m[1] not in there]
    if not missing:
        return text
    return "\n\n".join([text.rstrip("\n"), *missing]) + "\n"


def with_keys(text: str, wanted: str, stages: str, path: str) -> str:
    """Return `params.yaml` with the keys that stages track one by one, with the values of `wanted` where it lacks them.

    DVC runs no stage whose key is missing.

    Args:
        text: a `params.yaml` with all sections.
        wanted: the `params.yaml` of a new project.
        stages: the `dvc.yaml` of a new project.
        path: where `text` is from.

    Raises:
        StowageError: a section is something else than a mapping.
    """
    defaults = YAML(typ="safe").load(wanted)
    for key in _tracked_keys(stages):
        section, _, name = key.partition(".")
        text = _with_key(text, section, name, defaults[section][name], path)
    return text


def _with_key(text: str, section: str, name: str, value: Any, path: str) -> str:
    content, style = _load(text, path)
    there = content.get(section)
    if not isinstance(there, CommentedMap | None):
        raise StowageError(f"{section} in {path} is not a mapping: mend it, or remove it.")
    if there and name in there:
        return text
    if not there or there.fa.flow_style():
        content[section] = there or CommentedMap()
        content[section].insert(0, name, value)
        return _dump(content, style)
    lines = text.splitlines(keepends=True)  # everything else stays as it was written
    lines.insert(there.lc.line, f"{' ' * there.lc.col}{name}: {json.dumps(value)}\n")
    return "".join(lines)


def _tracked_keys(stages: str) -> list[str]:
    """Return the keys within a section of `params.yaml` that a `dvc.yaml` names, such as `solve.freeze`."""
    tracked = [key for stage in YAML(typ="safe").load(stages)["stages"].values() for key in stage["params"]]
    return sorted({key for key in tracked if isinstance(key, str) and "." in key})


def outputs_in_cache(stages: str) -> list[str]:
    """Return patterns that keep out of Git what the stages of a `dvc.yaml` leave to DVC's cache.

    DVC writes such patterns too, stage by stage, but a run that is killed, or another at the same time, may lose some.
    """
    outputs = [
        output
        for stage in YAML(typ="safe").load(stages)["stages"].values()
        for kind in ("outs", "metrics", "plots")
        for output in stage.get(kind, [])
    ]
    return [f"/{output}" for output in outputs if isinstance(output, str)]  # with settings it is a mapping: not cached


def with_stages(text: str, wanted: str, path: str) -> str:
    """Return `dvc.yaml` with the stages of `wanted`, keeping stages, deps, params and outs that people added.

    Raises:
        StowageError: a stage of that name does something else.
    """
    content, style = _load(text, path)
    new = YAML(typ="rt").load(wanted)
    stages = content.setdefault("stages", {})
    before = _plain(content)
    _add_plots(content, new.get("plots") or [])
    for name, stage in new["stages"].items():
        present = stages.get(name)
        if present is None:
            stages[name] = stage
            continue
        if not isinstance(present, dict) or present.get("cmd") != stage["cmd"]:
            raise StowageError(
                f"{path} has a stage {name} of its own, and so does Stowage: run `stowage init FOLDER`, which makes a "
                "folder with a pipeline of its own."
            )
        for key in _OURS:
            present[key] = stage[key]
        for key in _LISTS:
            joined = _joined(present.get(key) or [], stage.get(key) or [])
            if joined != _plain(present.get(key) or []):
                present[key] = joined
    return text if _plain(content) == before else _dump(content, style)


def _add_plots(content: dict[str, Any], wanted: list[Any]) -> None:
    """Add the plots that are missing by name; DVC takes a list of them, or a mapping."""
    there = content.get("plots")
    named = {name: plot for item in wanted for name, plot in item.items()}
    if isinstance(there, dict):
        for name, plot in named.items():
            there.setdefault(name, plot)
        return
    known = {_key(item) for item in there or []}
    missing = [{name: plot} for name, plot in named.items() if name not in known]
    if missing:
        content["plots"] = [*(there or []), *missing]


def with_deployments(text: str, wanted: str, path: str) -> str:
    """Return `prefect.yaml` with those deployments of `wanted` that it lacks."""
    content, style = _load(text, path)
    there = content.get("deployments") or []
    known = {(item.get("name"), item.get("entrypoint")) for item in there if isinstance(item, dict)}
    missing = [
        item for item in YAML(typ="rt").load(wanted)["deployments"] if (item["name"], item["entrypoint"]) not in known
    ]
    if not missing:
        return text
    content["deployments"] = [*there, *missing]
    return _dump(content, style)


def _joined(present: list[Any], wanted: list[Any]) -> list[Any]:
    """Return what is wanted, and what people added; an entry of a file of parameters counts by the file's name."""
    ours = {_key(item) for item in wanted}
    added = [item for item in present if _key(item) not in ours and not _outdated(item, ours)]
    return [_plain(item) for item in (*wanted, *added)]


def _outdated(item: Any, ours: set[str]) -> bool:
    """Return whether an entry is of a checkout's `dvc.yaml`: a folder of code, or a key of a section that is named."""
    if not isinstance(item, str):
        return False
    return bool(_FOLDERS_OF_CODE.fullmatch(item)) or item.partition(".")[0] in ours


def _key(item: Any) -> str:
    return str(next(iter(item))) if isinstance(item, dict) else str(item)


def _plain(item: Any) -> Any:
    if isinstance(item, dict):
        return {str(key): _plain(value) for key, value in item.items()}
    return [_plain(value) for value in item] if isinstance(item, list) else item


def _load(text: str, path: str) -> tuple[Any, YAML]:
    """Return the content with its comments, and a writer that indents as the file does."""
    style = YAML()
    style.preserve_quotes = True
    style.width = 1 << 20
    try:
        content, _, offset = load_yaml_guess_indent(text, yaml=style)
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise StowageError(f"{path} is not valid YAML ({' '.join(str(error).split())[:200]}): mend it.") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise StowageError(f"{path} is not a mapping: mend it, or move it away and run the same command again.")
    indent = 2 if offset is None else offset
    style.indent(mapping=2, sequence=indent + 2, offset=indent)
    return content, style


def _dump(content: Any, style: YAML) -> str:
    stream = io.StringIO()
    style.dump(content, stream)
    return stream.getvalue()
