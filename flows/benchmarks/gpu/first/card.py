"""Reports versions, the card, the attention that PyTorch chooses, free memory, and direct writes from pinned memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stowage.flows.benchmarks.gpu.clocks import clocks_now, driver
from stowage.flows.benchmarks.gpu.job import CUBLAS_SETTING
from stowage.flows.benchmarks.gpu.steps import NOT_ASKED, StepAnswer
from stowage.stages.device.heap import available_bytes

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the allocator's settings; in torch 2.11 the second wins where both are set."""

SDP = {0: "math", 1: "flash", 2: "efficient", 3: "cuDNN", 4: "overrideable"}
"""Numbers of PyTorch's attention backends -> their names."""

SHAPES = {
    "bfloat16 (4, 32, 512, 128), causal": ((4, 32, 512, 128), torch.bfloat16, 0.0),
    "float32 (4, 12, 256, 64), causal, dropout": ((4, 12, 256, 64), torch.float32, 0.1),
}

WRITE_BYTES = 8 << 20
"""Bytes of the direct write that is tried."""

PINNED_BYTES = 1 << 30


def look(asked: dict[str, Any]) -> StepAnswer:
    """Report versions, card, clocks, attention, free memory, and rates of pinning and direct writes."""
    cuda = asked["device"] == "cuda"
    numbers: dict[str, Any] = {
        "versions": _versions(),
        "settings": {name: os.environ.get(name, "") for name in (*ALLOCATOR_SETTINGS, CUBLAS_SETTING)},
        "card": _card() if cuda else NOT_ASKED,
        "clocks": (clocks_now() or "nvidia-smi does not tell") if cuda else NOT_ASKED,
        "attention": {name: _choice(asked["device"], *shape) for name, shape in SHAPES.items()},
        "efficient attention's philox seed and offset": _philox() if cuda else NOT_ASKED,
        "free host memory, bytes": available_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "pinning, bytes per second": _pinning(asked["pinned_bytes"]) if cuda else NOT_ASKED,
        "direct write": _direct_write(asked["device"], asked["folder"]),
    }
    attention = ", ".join(f"{name}: {choice}" for name, choice in numbers["attention"].items())
    return StepAnswer(
        "held", numbers=numbers, lines=(f"attention is {attention}", f"direct write: {numbers['direct write']}")
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "pyarrow", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["CUDA"] = str(torch.version.cuda)
    with contextlib.suppress(Exception):  # a build without cuDNN
        version: Any = torch.backends.cudnn.version
        found["cuDNN"] = str(version())
    return found


def _card() -> dict[str, Any]:
    index = torch.cuda.current_device()
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory, bytes": total,
        "free, bytes": free,
        "driver": driver(),
    }


def _choice(device: str, shape: tuple[int, ...], dtype: torch.dtype, dropout: float) -> str:
    choose: Any = getattr(torch, "_fused_sdp_choice", None)
    try:
        q, k, v = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        number = int(choose(q, k, v, None, dropout, True))
    except Exception as error:  # a private function: it may take other arguments tomorrow
        return f"not known ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})"
    return SDP.get(number, str(number))


def _philox() -> str:
    """Say on which device the seed and offset of efficient attention are, from which its backward reads them."""
    attend: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda") for _ in range(3))
    try:
        found = attend(q, k, v, None, True, 0.1, True)
    except Exception as error:  # the operator is not built for this card
        return f"not known ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})"
    return " and ".join(f"{t.device} {tuple(t.shape)} {t.dtype}" for t in found[2:4])


def _pinning(nbytes: int) -> float:
    """Return the rate of pinning host memory, in bytes per second."""
    began = time.perf_counter()
    kept = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    elapsed = time.perf_counter() - began
    del kept
    return nbytes / elapsed


def _direct_write(device: str, folder: str) -> str:
    """Try one write past the page cache, from pinned memory where there is a card."""
    if device == "cuda":
        memory = torch.empty(WRITE_BYTES, dtype=torch.uint8, pin_memory=True)
    else:
        memory = torch.frombuffer(mmap.mmap(-1, WRITE_BYTES), dtype=torch.uint8)
    memory.fill_(7)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            handle = os.open(file.name, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            return f"{folder} takes none ({error.strerror})"
        try:
            began = time.perf_counter()
            written = os.write(handle, memory.numpy().data)
            os.fsync(handle)
            elapsed = time.perf_counter() - began
        except OSError as error:
            return f"refused ({error.strerror})"
        finally:
            os.close(handle)
    return f"{written} of {WRITE_BYTES} bytes at {written / elapsed / 1e9:.2f} GB/s"
