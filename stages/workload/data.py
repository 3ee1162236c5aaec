"""Reads real tokens as one long stream, and cuts batches that depend on the seed and the iteration's number alone.

An epoch is the stream cut into windows of `sequence_length` tokens, in an order drawn for that epoch; iteration `i`
takes windows `i·B … i·B + B − 1`, running on into the next epoch. So training resumes at any iteration without a
replay, and no global generator is touched. The last tokens that do not fill a window are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stowage.stages.ir.errors import ParameterError
from stowage.stages.workload.randomness import generator

PYDOC_TOPICS = "pydoc_topics"
"""The name of a text that every Python has: about 700 kB of its language reference, in `pydoc_data.topics`."""

BYTE_VOCABULARY = 256


def token_stream(
    source: str | Path,
    column: str | None = None,
    tokenizer: str | Path | None = None,
    *,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Return all tokens, one after the other.

    Args:
        source: `pydoc_topics`, a text file, or a `.parquet` file.
        column: the Parquet column: strings, or lists of token ids.
        tokenizer: folder of a Hugging Face tokenizer; without one the tokens are the bytes.
        vocabulary: number of ids that the model accepts; None leaves this unchecked.

    Returns:
        A 1-D tensor: uint8 for bytes, int64 for token ids.

    Raises:
        ParameterError: the file, column or tokenizer is missing or unusable, there is no text, or an id is too large.
    """
    path = _source_path(source)
    if path.suffix == ".parquet":
        stream = _parquet_stream(path, column, tokenizer)
    elif column is not None:
        raise ParameterError(f"train.data.column {column!r} goes with a .parquet file, not with {path}: remove it.")
    elif tokenizer is not None:
        stream = _encode([_text(path)], tokenizer)
    else:
        stream = _bytes(_content(path))
    if stream.numel() == 0:
        raise ParameterError(f"train.data.source {source} holds no tokens.")
    check_vocabulary(stream, vocabulary, str(source))
    return stream


def check_vocabulary(stream: torch.Tensor, vocabulary: int | None, source: str) -> None:
    """Refuse token ids that the model's embedding does not have."""
    if vocabulary is None:
        return
    largest, smallest = int(stream.max()), int(stream.min())
    if largest >= vocabulary or smallest < 0:
        worst = largest if largest >= vocabulary else smallest
        raise ParameterError(
            f"train.data.source {source} holds token id {worst}, but the model's vocabulary has {vocabulary} ids "
            f"(0 to {vocabulary - 1}): raise vocab_size or use the model's own tokenizer."
        )


def batches(
    stream: torch.Tensor, batch_size: int, sequence_length: int, seed: int, start_iteration: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, from iteration `start_iteration` on; see `batch_at`."""
    _window_count(stream, batch_size, sequence_length)
    iteration = start_iteration
    while True:
        yield batch_at(stream, batch_size, sequence_length, seed, iteration)
        iteration += 1


def batch_at(
    stream: torch.Tensor, batch_size: int, sequence_length: int, seed: int, iteration: int
) -> dict[str, torch.Tensor]:
    """Return one iteration's batch: `input_ids` and `labels`, separate int64 tensors `(batch_size, sequence_length)`.

    Labels equal the ids: models shift them themselves.

    Raises:
        ParameterError: the stream is shorter than one window.
    """
    windows = _window_count(stream, batch_size, sequence_length)
    rows = []
    for position in range(iteration * batch_size, (iteration + 1) * batch_size):
        epoch, place = divmod(position, windows)
        start = int(_order(windows, seed, epoch)[place]) * sequence_length
        rows.append(stream[start : start + sequence_length])
    ids = torch.stack(rows).to(torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


@lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> torch.Tensor:
    return torch.randperm(windows, generator=generator(seed, epoch))


def _window_count(stream: torch.Tensor, batch_size: int, sequence_length: int) -> int:
    if batch_size < 1 or sequence_length < 1:
        raise ParameterError(f"Batches of {batch_size} × {sequence_length} tokens are empty: both must be at least 1.")
    windows = stream.numel() // sequence_length
    if windows == 0:
        raise ParameterError(
            f"train.data holds {stream.numel()} tokens, fewer than one sequence of {sequence_length}: "
            "shorten trace.sequence_length or give more text."
        )
    return windows


def _source_path(source: str | Path) -> Path:
    if source == PYDOC_TOPICS:
        found = importlib.util.find_spec("pydoc_data.topics")
        if found is None or found.origin is None or not Path(found.origin).is_file():
            raise ParameterError("This Python has no pydoc_data.topics file: name a text file in train.data.source.")
        return Path(found.origin)
    path = Path(source)
    if not path.is_file():
        raise ParameterError(
            f"train.data.source {path} does not exist: give a text file, a .parquet file, or {PYDOC_TOPICS}."
        )
    return path


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ParameterError(
            f"train.data.source {path} cannot be read ({error.strerror}): make it readable."
        ) from error


def _text(path: Path) -> str:
    try:
        return _content(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not UTF-8 text: leave train.data.tokenizer out to train on bytes.") from error


def _bytes(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _parquet_stream(path: Path, column: str | None, tokenizer: str | Path | None) -> torch.Tensor:
    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise ParameterError(f"{path} is damaged and cannot be read as Parquet: write it again.") from error
    if column is None:
        raise ParameterError(f"train.data.column is missing: {path} has the columns {', '.join(names)}.")
    if column not in names:
        raise ParameterError(f"train.data.column {column!r} is not in {path}, which has {', '.join(names)}.")
    try:
        values = pq.read_table(path, columns=[column]).column(column)
    except (pa.ArrowException, OSError) as error:
        raise ParameterError(f"{path} is damaged and cannot be read as Parquet: write it again.") from error
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not pa.types.is_integer(kind.value_type):
            raise ParameterError(f"Column {column!r} of {path} holds lists of {kind.value_type}, not of token ids.")
        flat = values.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return torch.from_numpy(np.array(flat, dtype=np.int64))
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ParameterError(f"Column {column!r} of {path} holds {kind}, not text or lists of token ids.")
    texts = [text for text in values.to_pylist() if text is not None]
    return _bytes("\n".join(texts).encode()) if tokenizer is None else _encode(texts, tokenizer)


def _encode(texts: list[str], directory: str | Path) -> torch.Tensor:
    """Return token ids of the texts, each followed by the tokenizer's end-of-text token where it has one."""
    from transformers import AutoTokenizer

    if not Path(directory).is_dir():
        raise ParameterError(f"train.data.tokenizer {directory} does not exist: give a tokenizer's folder.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ParameterError(f"train.data.tokenizer {directory} cannot be loaded: {reason}") from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    return torch.tensor(ids, dtype=torch.int64, device="cpu")
