"""Token streams and batches: deterministic, resumable, and with errors that name file and column."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.data import batch_at, batches, token_stream


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "texts.parquet"
    columns: dict[str, Any] = {"text": ["ab", None, "cd"], "ids": [[1, 2], [3], [70000]], "score": [0.5, 1.0, 2.0]}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1, "tensor": 2, "memory": 3}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    return folder


def test_pydoc_topics_are_bytes() -> None:
    stream = token_stream("pydoc_topics", vocabulary=256)
    assert stream.dtype == torch.uint8
    assert stream.ndim == 1
    assert stream.numel() > 100_000
    assert b"topics" in bytes(stream[:2000].tolist())


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("héllo")
    assert bytes(token_stream(path).tolist()) == "héllo".encode()


def test_parquet_text_and_ids(table: Path) -> None:
    assert bytes(token_stream(table, "text").tolist()) == b"ab\ncd"
    ids = token_stream(table, "ids")
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 2, 3, 70000]


def test_tokenizer_ends_each_text(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": ["tensor memory", "memory maps"]}), path)
    assert token_stream(path, "text", tokenizer).tolist() == [2, 3, 0, 3, 1, 0]
    text = tmp_path / "a.txt"
    text.write_text("memory tensor")
    assert token_stream(text, None, tokenizer).tolist() == [3, 2, 0]


def test_errors_name_the_file_and_the_column(table: Path, tmp_path: Path, tokenizer: Path) -> None:
    cases: list[tuple[tuple[Any, ...], int | None, str]] = [
        ((tmp_path / "no.txt",), None, r"no\.txt does not exist"),
        ((table,), None, "column is missing: .*text, ids, score"),
        ((table, "words"), None, "'words' is not in .*text, ids, score"),
        ((table, "score"), None, "'score' .* holds double"),
        ((table, "ids"), 70000, "token id 70000.* has 70000 ids"),
        ((table, "text", tmp_path / "none"), None, "none does not exist"),
        ((table, "text", tmp_path), None, "cannot be loaded"),
    ]
    for arguments, vocabulary, message in cases:
        with pytest.raises(ParameterError, match=message):
            token_stream(*arguments, vocabulary=vocabulary)
    damaged, empty, latin = tmp_path / "d.parquet", tmp_path / "empty.txt", tmp_path / "latin.txt"
    damaged.write_bytes(b"PAR1 not really")
    empty.write_bytes(b"")
    latin.write_bytes(b"\xff\xfe\xfa")
    for path, given, message in (
        (damaged, None, "damaged"),
        (empty, None, "no tokens"),
        (latin, tokenizer, "not UTF-8"),
    ):
        with pytest.raises(ParameterError, match=message):
            token_stream(path, "x" if path is damaged else None, given)
    with pytest.raises(ParameterError, match=r"goes with a \.parquet file"):
        token_stream(empty, "text")


def test_batches_resume_anywhere_and_touch_no_global_generator() -> None:
    stream = torch.arange(1000)
    state = torch.get_rng_state()
    through = list(itertools.islice(batches(stream, 3, 16, seed=5), 60))
    for start in (1, 17, 59):
        (resumed,) = itertools.islice(batches(stream, 3, 16, seed=5, start_iteration=start), 1)
        assert torch.equal(resumed["input_ids"], through[start]["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)
    other = batch_at(stream, 3, 16, 6, 0)
    assert not torch.equal(other["input_ids"], through[0]["input_ids"])


def test_an_epoch_uses_every_window_once() -> None:
    stream = torch.arange(160)
    starts = [row[0].item() for i in range(5) for row in batch_at(stream, 2, 16, 0, i)["input_ids"]]
    assert sorted(starts) == list(range(0, 160, 16))
    again = [row[0].item() for i in range(5, 10) for row in batch_at(stream, 2, 16, 0, i)["input_ids"]]
    assert sorted(again) == sorted(starts)
    assert again != starts


def test_form_of_a_batch() -> None:
    batch = batch_at(token_stream("pydoc_topics"), 4, 32, 0, 0)
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "input_ids": ((4, 32), torch.int64),
        "labels": ((4, 32), torch.int64),
    }
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"] is not batch["labels"]


def test_a_stream_shorter_than_a_sequence() -> None:
    with pytest.raises(ParameterError, match="5 tokens, fewer than one sequence of 8"):
        next(batches(torch.arange(5), 1, 8, 0))
    with pytest.raises(ParameterError, match="at least 1"):
        next(batches(torch.arange(5), 0, 8, 0))
