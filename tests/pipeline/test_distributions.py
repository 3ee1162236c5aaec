"""Wheel and sdist: what is in them, and that `fit` needs neither Prefect nor DVC."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed import Installed, build, install

import stowage

FIT = """
import sys
import stowage
assert "torch" not in sys.modules
import torch
from stowage import fit
from torch import nn
torch.set_num_threads(1)

def made():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x).square().mean()

x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
plain, optimizer = made()
expected = []
for _ in range(3):
    optimizer.zero_grad()
    loss = Loss(plain)(x)
    loss.backward()
    optimizer.step()
    expected.append(float(loss))
model, optimizer = made()
step = fit(Loss(model), {"x": x}, optimizer, device_budget="80%", quick=True, cache_dir=sys.argv[1])
found = [float(step({"x": x})) for _ in range(3)]
assert found == expected, (found, expected)
for p, q in zip(plain.parameters(), model.parameters()):
    assert torch.equal(p, q)
assert not {"prefect", "dvc", "fastapi"} & set(sys.modules)
print("equal", stowage.__version__)
"""


@pytest.fixture(scope="module")
def lean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment as `pip install stowage` makes it: without the extra `pipeline`."""
    return install(tmp_path_factory.mktemp("lean"), wheel, without=("prefect", "dvc", "fastapi"))


def test_fit_runs_a_step_equal_to_plain_pytorch_without_the_pipeline(lean: Installed, tmp_path: Path) -> None:
    assert lean.start([lean.python, "-c", "import prefect"], tmp_path).returncode == 1
    said = lean.run([lean.python, "-c", FIT, str(tmp_path / "home")], tmp_path)
    assert said.strip().splitlines()[-1] == f"equal {stowage.__version__}"


@pytest.mark.parametrize(("command", "module"), [(["plan"], "prefect"), (["init", "--model", "gpt2"], "dvc")])
def test_a_missing_extra_is_one_sentence(lean: Installed, tmp_path: Path, command: list[str], module: str) -> None:
    lean.run(["git", "init", "--quiet"], tmp_path)
    done = lean.start(["stowage", *command], tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr == f"error: This needs {module}, which is not installed: run `pip install 'stowage[pipeline]'`.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [".git"]


def test_the_sdist_makes_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build(tree, "sdist", tmp_path / "dist")
    with tarfile.open(sdist) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # not in every Python 3.11
        file.extractall(tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.name.startswith("stowage-"))
    again = build(unpacked, "wheel", tmp_path / "again")
    one, other = ({i.filename: i.CRC for i in zipfile.ZipFile(w).infolist()} for w in (wheel, again))
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} <= {name for name in one if name.endswith("/RECORD")}
    assert {
        "stowage/py.typed",
        "stowage/__init__.py",
        "stowage/flows/starter/templates/dvc.yaml.template",
    } <= one.keys()
    assert any(name.endswith("/licenses/LICENSE") for name in one)


def test_the_metadata_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith("/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    assert metadata["Version"] == stowage.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Summary"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(metadata.get_all("Classifier", []))
    assert {"pipeline", "recipes", "dask", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("prefect", "dvc", "fastapi")) or "==" in line]
