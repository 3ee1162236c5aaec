"""Files of tensors: what the library reads and writes, one tensor at a time, and damage is seen before it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stowage.stages.ir.errors import StowageError, TableError
from stowage.stages.runtime.files import tensor_file
from stowage.stages.runtime.files.tensor_file import Entry, TensorFile, Visitor, write_tensors

TENSORS = {
    "number": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "bf16": torch.randn(5, 3).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "transposed": torch.randn(7, 130).t(),
    "image": torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
    "window": torch.randn(9, 9)[2:5, 1:8:2],
    "expanded": torch.tensor(2.0).expand(4, 4),
    "bytes": torch.arange(255, dtype=torch.uint8),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "long": torch.arange(1000),
}


def entries(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    def visit(tensor: torch.Tensor) -> Callable[[Visitor], None]:
        return lambda use: use(tensor)

    return [Entry(name, tensor, visit(tensor)) for name, tensor in tensors.items()]


@pytest.fixture(params=[None, 16], ids=["whole", "in pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(tensor_file, "_PIECE", request.param)
        monkeypatch.setattr(tensor_file, "_UNSYNCED", 2 * request.param)


@pytest.mark.usefixtures("pieces")
def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    write_tensors(path, entries(TENSORS), {"made": "here"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata().keys() == {"made", "stowage.digest"}
        assert file.metadata()["made"] == "here"
    TensorFile(path, hint="mend it").verify()
    assert os.listdir(tmp_path) == ["tensors"]


@pytest.mark.usefixtures("pieces")
def test_what_the_library_writes_is_read_into_any_layout(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    save_file({name: t.resolve_conj().contiguous() for name, t in TENSORS.items()}, path, {"made": "there"})
    file = TensorFile(path, hint="mend it")
    assert file.metadata == {"made": "there"}
    file.verify()  # nothing to compare with
    for name, tensor in TENSORS.items():
        assert torch.equal(file.get(name), tensor)
        if name != "expanded":
            target = torch.zeros_like(tensor)
            file.read(name, target)
            assert torch.equal(target, tensor)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 0.999, 1.2])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tensors"
    write_tensors(path, entries(TENSORS))
    content = path.read_bytes() * 2
    path.write_bytes(content[: int(share * len(content) / 2)])
    with pytest.raises(TableError, match="is damaged: mend it"):
        TensorFile(path, hint="mend it")


def test_nothing_is_left_of_a_file_that_could_not_be_finished(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    wrong = Entry("a", torch.zeros(4), lambda use: use(torch.zeros(3)))
    with pytest.raises(StowageError, match="'a' is not what it was"):
        write_tensors(path, [wrong])
    with pytest.raises(StowageError, match="safetensors files cannot hold"):
        write_tensors(path, entries({"a": torch.zeros(2, dtype=torch.complex128)}))
    assert os.listdir(tmp_path) == []
