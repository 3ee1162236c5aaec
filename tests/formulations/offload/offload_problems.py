"""Llama-like chains for O-ILP, and tiny ones by hand."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from stowage.stages.formulations.offload.problem import (
    OffloadBlock,
    OffloadMachine,
    OffloadOption,
    OffloadProblem,
    ParameterTensor,
    group_parameters,
)
from stowage.stages.ir.machine import Link

GB = 10**9
GIB = 1 << 30

LLAMA2_7B = (4096, 11008, 32, 32000, 4096)
LLAMA3_70B = (8192, 28672, 80, 128256, 1024)
"""Width, MLP width, layers, vocabulary, width of keys and values."""


def rtx3060(device_bytes: int = 10 * GIB, host_bytes: int = 128 * GB) -> OffloadMachine:
    """The preprint's first machine: 12 GB less 2 GB; 10.4 GB/s each way; H = 50 ms."""
    return OffloadMachine(device_bytes, Link(10.4 * GB, 10.4 * GB), host_bytes=host_bytes, management_s=0.05)


def llama(
    machine: OffloadMachine,
    shape: tuple[int, int, int, int, int] = LLAMA2_7B,
    *,
    halves: bool = False,
    itemsize: int = 4,
    states: int = 2,
    tokens: int = 2048,
    flops: float = 7.9e12,
    saved_bytes: int | None = None,
    alpha_g: float = 16.6 * GB,
    alpha_c: float = 1.1 * GB,
    activation_offload: bool = True,
) -> OffloadProblem:
    """A Llama with the three options of the thesis (4.4): keep all; recompute all; recompute what is cheap and offload
    the rest. Embedding and head belong to the first and the last block.

    Args:
        machine: tiers.
        shape: of the model.
        halves: attention and MLP are blocks of their own.
        itemsize: bytes of a number.
        states: optimizer states per number.
        tokens: in the batch.
        flops: per second, reached.
        saved_bytes: activations of a layer that plain PyTorch keeps.
        alpha_g, alpha_c: bytes of parameters updated per second; 0 for no updates on the CPU.
        activation_offload: whether there is the third option.
    """
    d, wide, layers, vocabulary, kv = shape
    if saved_bytes is None:
        saved_bytes = int(40.8 * GB / 32) * tokens * d * itemsize // (2048 * 4096 * 4)
    attention = [("q", d * d), ("k", d * kv), ("v", d * kv), ("o", d * d), ("norm1", d)]
    mlp = [("gate", d * wide), ("up", d * wide), ("down", wide * d), ("norm2", d)]
    parts = [attention, mlp] if halves else [attention + mlp]
    count = layers * len(parts)
    tensors: list[tuple[ParameterTensor, list[int]]] = []

    def add(name: str, numbers: int, block: int) -> int:
        nbytes = numbers * itemsize
        cpu_s = nbytes / alpha_c if alpha_c else math.inf
        tensors.append((ParameterTensor(name, nbytes, states * nbytes, True, nbytes / alpha_g, cpu_s), [block]))
        return nbytes

    output = tokens * d * itemsize
    blocks = []
    for i in range(count):
        part = parts[i % len(parts)]
        numbers = sum(n for _, n in part)
        # Each gradient goes as soon as its parameter is updated: the largest two are there at once.
        sizes = [add(f"{i}.{name}", n, i) for name, n in part]
        forward_s = 2 * tokens * numbers / flops
        extra_s = 0.0
        if i == 0:
            sizes.append(add("embedding", vocabulary * d, 0))
        if i == count - 1:
            sizes.append(add("head", vocabulary * d, i))
            extra_s = 2 * tokens * vocabulary * d / flops
        gradients = sum(sorted(sizes)[-2:])
        logits = 2 * tokens * vocabulary * itemsize if i == count - 1 else 0
        saved = saved_bytes // len(parts)
        matmuls = sum(n // d for name, n in part if name in ("q", "k", "v", "o", "gate", "up")) * tokens * itemsize
        working = saved // 4 + logits
        options = [
            OffloadOption(
                forward_s + extra_s, 2 * (forward_s + extra_s), saved, saved + working, saved + working + gradients
            ),
            OffloadOption(
                forward_s + extra_s, 3 * forward_s + 2 * extra_s, output, 2 * working, saved + working + gradients
            ),
        ]
        if activation_offload:
            cheap_s = 0.1 * forward_s
            options.append(
                OffloadOption(
                    forward_s + extra_s,
                    2 * (forward_s + extra_s) + cheap_s,
                    output,
                    matmuls + working,
                    saved + working + gradients,
                    matmuls,
                )
            )
        blocks.append(OffloadBlock(tuple(options), fixed_backward_bytes=gradients))
    groups = group_parameters(tensors, smallest_bytes=1 << 20)
    return OffloadProblem(tuple(blocks), groups, machine)


def compute_s(problem: OffloadProblem) -> float:
    """The papers' base: forward, backward and every update on the device, with the first options."""
    times = sum(b.options[0].forward_time_s + b.options[0].backward_time_s for b in problem.blocks)
    return times + sum(g.device_update_s + g.pinned_update_s for g in problem.groups)


@st.composite
def problems(draw: st.DrawFn, max_blocks: int = 4, cpu: bool = True) -> OffloadProblem:
    """A small chain with random sizes and times, tied and frozen parameters, and some budget."""
    count = draw(st.integers(1, max_blocks))
    numbers, times = st.integers(0, 12), st.integers(1, 20).map(float)
    blocks = []
    for _ in range(count):
        options = []
        for _ in range(draw(st.integers(1, 2))):
            save, extra = draw(numbers), draw(numbers)
            peaks = save + extra, save + draw(numbers)
            options.append(OffloadOption(draw(times), draw(times), save, *peaks, draw(st.integers(0, 6))))
        blocks.append(OffloadBlock(tuple(options), draw(st.integers(0, 3)), draw(st.integers(0, 3))))
    tensors: list[tuple[ParameterTensor, list[int]]] = []
    states, slow = draw(st.integers(0, 2)), draw(st.booleans()) or not cpu
    for number in range(draw(st.integers(1, 2 * count))):
        size = draw(st.integers(1, 20))
        used = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True))
        trainable = draw(st.integers(0, 5)) > 0
        cpu_s = math.inf if slow else float(size)
        tensor = ParameterTensor(f"p{number}", size, states * size if trainable else 0, trainable, size / 10, cpu_s)
        tensors.append((tensor, used))
    groups = group_parameters(tensors, smallest_bytes=draw(st.sampled_from((0, 3))))
    rate = st.sampled_from((1.0, 2.0, 5.0))
    machine = OffloadMachine(
        device_bytes=draw(st.integers(20, 150)),
        link=Link(draw(rate), draw(rate), draw(st.sampled_from((math.inf, 3.0)))),
        fixed_bytes=draw(st.integers(0, 5)),
        management_s=draw(st.sampled_from((0.0, 0.5))),
    )
    return OffloadProblem(tuple(blocks), groups, machine)
