"""`params.yaml`: what is right loads, and what is wrong is one sentence that names the key."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from stowage.stages.ir.errors import ParameterError
from stowage.stages.settings import Settings, load_settings, parse_bytes, parse_settings, resolve_budget
from stowage.stages.settings.sizes import parse_percentage

ROOT = Path(__file__).parents[2]


def with_value(key: str, value: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"trace": {"model": {"architecture": "gpt2"}}}
    place = content
    *sections, name = key.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return content


def test_sections_of_other_tools_are_left_alone() -> None:
    for name in ("featurize", "lr", "training", "data"):
        settings = parse_settings({**with_value("solve.device_budget", "70%"), name: {"any": 1}}, "params.yaml")
        assert settings.solve.device_budget == "70%"


def test_the_main_job_loads() -> None:
    settings = load_settings(ROOT / "params.yaml")
    assert settings.trace.model.architecture == "gpt2"
    assert settings.trace.optimizer is not None
    assert settings.trace.optimizer.arguments["lr"] == 1e-4
    assert settings.solve.device_budget == "50%"
    assert settings.train.measure_every == 3


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trace.batch_sze", 4, "rename it to trace.batch_size"),
        ("trian", {}, "rename it to train"),
        ("trace.optimizer.nam", "SGD", "rename it to trace.optimizer.name"),
        ("solve.colour", "red", "use one of solve.device_budget"),
        ("trace.batch_size", "four", "trace.batch_size must be a valid integer, and is 'four' (str)"),
        ("trace.batch_size", True, "trace.batch_size must be a valid integer"),
        ("trace.sequence_length", 0, "trace.sequence_length must be greater than 0"),
        ("trace.device", "tpu", "trace.device must be 'cpu' or 'cuda'"),
        ("trace.loss", "my_loss", "'package.module:function'"),
        ("trace.optimizer.name", "torch.optim.SGD", "not the name of a class"),
        ("trace.model.directory", "somewhere", "exactly one of architecture, directory and callable"),
        ("trace.model.architecture", None, "found none of them"),
        ("profile", None, "profile must be a section"),
        ("options.time_limit_s", float("nan"), "options.time_limit_s must be a finite number"),
        ("options.task_runner", "slurm", "options.task_runner must be 'threads', 'processes' or 'dask'"),
        ("options.task_runner", "dask", "task_runner dask needs dask_scheduler"),
        ("options.dask_scheduler", "somewhere", "'somewhere' is not the address of a scheduler"),
        ("solve.device_budget", "5 apples", "'5 apples' is not a budget"),
        ("solve.device_budget", "-50%", "is not a budget"),
        ("solve.device_budget", 1.5, "is not a budget"),
        ("solve.time_limit_s", 0, "solve.time_limit_s must be greater than 0"),
        ("solve.gap", 1.0, "solve.gap must be less than 1"),
        ("solve.gap", -0.1, "solve.gap must be greater than or equal to 0"),
        ("train.data.column", "text", "column is for .parquet files"),
        ("train.data.callable", "my_data", "my_data"),
        ("train.data", {"callable": "m:f", "source": "rows.txt"}, "callable makes the batches, and source is for text"),
        ("sovle", {"device_budget": "50%"}, "sovle is not a known key; rename it to solve"),
        ("train.measure_every", "b", "train.measure_every must be a valid integer"),
    ],
)
def test_each_mistake_is_one_sentence(key: str, value: Any, says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_settings(with_value(key, value), "params.yaml")
    text = str(caught.value)
    assert text.startswith("params.yaml: ")
    assert says in text
    assert "\n" not in text
    assert text.endswith(".")


def test_callable_and_overrides_exclude_each_other() -> None:
    content = {"trace": {"model": {"callable": "my.model:build", "overrides": {"n_layer": 2}}}}
    with pytest.raises(ParameterError, match="overrides go with architecture, not with callable"):
        parse_settings(content)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trace: [", "is not valid YAML"),
        ("trace:\n  seed: 1\n  seed: 2\n", 'duplicate key "seed"'),
        ("- a list\n", "must be a mapping of sections"),
        ("", "must be a mapping of sections such as trace and solve, and is empty"),
        ("solve: {}\n", "trace is missing"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError) as caught:
        load_settings(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"params\.yaml is missing"):
        load_settings(tmp_path / "params.yaml")


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(f"trace: {{model: {{architecture: gpt2}}, optimizer: {{name: SGD, arguments: {{lr: {text}}}}}}}\n")
    optimizer = load_settings(path).trace.optimizer
    assert optimizer is not None
    assert optimizer.arguments == {"lr": 1e-4}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("900MiB", 900 << 20), ("1.5GiB", 3 << 29), ("12GB", 12 * 10**9), ("4096", 4096), (4096, 4096), ("7 kib", 7168)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


WRONG_SIZES = ["", "MiB", "twelve", "0", "-3MiB", 0, "5MiBs", True, None, "1,5GiB", "900MiB/2", "50%", "1e308", "nan"]
WRONG_SIZES += ["999999PiB", "1 2", "1.5", "0x10", "1_000", "900 MiB MiB", "1e3MiB", ".", "9" * 40, "١MiB", "9MiB\x00"]


@pytest.mark.parametrize("text", WRONG_SIZES)
def test_what_is_not_a_size(text: Any) -> None:
    with pytest.raises(ParameterError, match=r"size is .* write"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["1e308%", "0%", "-5%", "nan%", "inf%", "5", "5%%", "5 % of it", "1,5%", "%", "9" * 9 + "%"]
)
def test_what_is_not_a_percentage(text: str) -> None:
    with pytest.raises(ParameterError, match=r"budget is .* write '50%'"):
        parse_percentage(text)


@pytest.mark.parametrize("key", ["solve.disk_budget", "solve.device_budget", "solve.host_budget"])
@pytest.mark.parametrize("text", ["1,5GiB", "900MiB/2", "1e308%", "999999PiB"])
def test_sizes_of_parameters_parse_whole(key: str, text: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"{key}: {text!r} is not a ")):
        parse_settings(with_value(key, text))


def test_a_disk_has_no_percentage() -> None:
    with pytest.raises(ParameterError, match=r"disk_budget: '50%' is not a size"):
        parse_settings(with_value("solve.disk_budget", "50%"))


TEXTS = ("_budget", "dir", "callable", "loss", "scheduler", "tokenizer", "directory")


def numbers(section: type[BaseModel] = Settings, key: str = "") -> Iterator[str]:
    """Every number of the parameters."""
    for name, field in section.model_fields.items():
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, f"{key}{name}.")
            elif (kind in (int, float) or typing.get_origin(kind) is typing.Annotated) and not name.endswith(TEXTS):
                yield f"{key}{name}"


@pytest.mark.parametrize("key", sorted(set(numbers())))
@pytest.mark.parametrize("value", [1 << 64, -1, 1 << 4000, float("inf"), -0.5, "1", [1]])
def test_every_number_has_bounds(key: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=re.escape(key)) as caught:
        parse_settings(with_value(key, value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_numbers_are_found() -> None:
    assert {"trace.seed", "options.workers", "solve.memory_slots", "train.steps", "partition.alpha"} <= set(numbers())


@pytest.mark.parametrize(
    "overrides", [{"n_layer": 10**6}, {"n_embd": 1 << 40}, {"a": {"b": [1 << 40]}}, {"x": float("nan")}]
)
def test_numbers_of_a_model_have_bounds_too(overrides: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"overrides\.\w+"):
        parse_settings(with_value("trace.model.overrides", overrides) | {})


def test_a_batch_of_too_many_tokens() -> None:
    content = with_value("trace.batch_size", 1 << 20)
    content["trace"]["sequence_length"] = 1 << 20
    with pytest.raises(ParameterError, match="tokens"):
        parse_settings(content)


@pytest.mark.parametrize(
    "key", ["trace.model.directory", "train.data.source", "train.data.tokenizer", "solve.offload_dir"]
)
@pytest.mark.parametrize("value", ["", "a\x00b", "a\nb", "x" * 300, "a/" * 2000])
def test_paths_are_paths(key: str, value: str) -> None:
    content = with_value(key, value)
    if key == "trace.model.directory":
        del content["trace"]["model"]["architecture"]
    with pytest.raises(ParameterError) as caught:
        parse_settings(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "trace: 2020-13-45",
        "trace: {seed: 2020-01-01}",
        "trace: &x [*x]",
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
        "trace: " + "[" * 60 + "]" * 60,
        "trace: " + "[" * 5000 + "]" * 5000,
        "? [1, 2]\n: 3",
        "1: 2",
        "trace: !!set {a}",
        "trace: !!binary aGk=",
        "trace: !!int x",
        "trace: !!python/object/apply:os.system [echo]",
        "trace: " + "9" * 5000,
        "--- {}\n--- {}",
        "trace: {batch_size: 1, 'batch_size': 2}",
    ],
)
def test_what_yaml_can_hold_and_parameters_cannot(text: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=re.escape(str(path))) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(percent=st.integers(1, 200), whole=st.integers(1, 1 << 50))
def test_percentages_are_of_the_whole(percent: int, whole: int) -> None:
    assert abs(resolve_budget(f"{percent}%", whole) - whole * percent / 100) <= 1 + whole * 1e-12


def test_a_size_is_not_of_the_whole() -> None:
    assert resolve_budget("900MiB", 5) == 900 << 20


def test_several_ranks_need_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("trace: {model: {architecture: gpt2}, ranks: 2, optimizer: null}")
    with pytest.raises(ParameterError, match="2 ranks exchange gradients before updates, and optimizer is null"):
        load_settings(path)
    path.write_text("trace: {model: {architecture: gpt2}, ranks: 2}")
    assert load_settings(path).trace.ranks == 2


@pytest.mark.parametrize(
    ("value", "kinds"), [("all", "all"), ("int8", ["int8"]), (None, []), ([], []), (["int8", "bf16"], ["int8", "bf16"])]
)
def test_kinds_of_codes(value: Any, kinds: Any) -> None:
    assert parse_settings(with_value("lossy.kinds", value)).lossy.kinds == kinds


@pytest.mark.parametrize("value", ["al", 3, ["int8", 3], {"a": 1}, ["all"], True, [["int8"]]])
def test_what_is_no_kind_of_codes(value: Any) -> None:
    with pytest.raises(ParameterError, match=r"lossy\.kinds: .* is no kind of codes: write a list of some of bf16, "):
        parse_settings(with_value("lossy.kinds", value))
