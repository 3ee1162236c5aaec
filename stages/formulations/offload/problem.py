"""The problem that O-ILP solves (thesis 4.5.1): blocks with options, parameter groups, and a machine, as plain values.

Steps are counted from 0 and are cyclic: F_0 … F_{L−1}, B_{L−1} … B_0, then F_0 of the next iteration. Within a step
nothing depends on anything else of the same step, except that a block's updates are offloaded after it (4.19):

- copies on the device are dropped at its start, and what is reloaded gets its device memory then;
- a block runs with all its parameters in memory; transfers and updates on the CPU run beside it;
- what was reloaded, offloaded or updated can be relied on from the next step on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from stowage.stages.ir.machine import Link


@dataclass(frozen=True)
class OffloadOption:
    """One way to run a block forward and backward (one `o` of the thesis); bytes leave out parameters and states.

    Attributes:
        forward_time_s, backward_time_s: computing, delays inside the block included, updates not.
        save_bytes: kept on the device between its forward and its backward, the block's output included (S and A).
        forward_peak_bytes: highest bytes in F_b, above what earlier blocks keep.
        backward_peak_bytes: highest bytes in B_b, above what earlier blocks keep: what it kept, the incoming gradient,
            workspace, and the gradients of its own parameters until each is updated or offloaded.
        offload_bytes: activations offloaded during F_b and reloaded during B_b (O); any part of them, chosen by the
            maker of the option.
        disk_bytes: the part of them that is copied on from the host to the disk.
    """

    forward_time_s: float
    backward_time_s: float
    save_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    offload_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class OffloadBlock:
    """A block of the chain.

    Attributes:
        options: the block's options, at least one.
        forward_resident_bytes, backward_resident_bytes: in memory in that step besides everything else counted, such
            as gradients that wait for a later contribution; independent of the batch.
        fixed_backward_bytes: the part of every option's `backward_peak_bytes` that does not grow with the batch: the
            gradients of its parameters. It matters only where the batch is chosen.
    """

    options: tuple[OffloadOption, ...]
    forward_resident_bytes: int = 0
    backward_resident_bytes: int = 0
    fixed_backward_bytes: int = 0


@dataclass(frozen=True)
class ParameterTensor:
    """A parameter, which is transferred as a whole; its gradient, where it has one, has its size (PyTorch's rule).

    Attributes:
        name: for people and for matching; unique.
        nbytes: bytes of the working weight.
        state_bytes: all optimizer states in total, a master copy included: 0 for SGD, 2·nbytes for Adam in fp32.
        trainable: it is updated in every iteration. Others never change: their copy in the lower tier stays valid.
        device_update_s: seconds of its update on the device.
        cpu_update_s: seconds of its update on the CPU, beside everything else; infinite where the CPU is the device.
    """

    name: str
    nbytes: int
    state_bytes: int = 0
    trainable: bool = True
    device_update_s: float = 0.0
    cpu_update_s: float = math.inf


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters used by exactly the same blocks that change alike (one `w`).

    The thesis lets a group hold trainable and other parts, |w|_g ≤ |w|. Here a group is one or the other: a fraction
    of it then means the same for the weight, its gradient and its states.

    Attributes:
        name: unique.
        blocks: blocks that use it, ascending.
        tensors: those that may be offloaded.
        pinned: those that are not worth offloading: they stay on the device with their states, and are counted.
    """

    name: str
    blocks: tuple[int, ...]
    tensors: tuple[ParameterTensor, ...]
    pinned: tuple[ParameterTensor, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Return |w|."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def state_bytes(self) -> int:
        """Return k|w|_g."""
        return sum(t.state_bytes for t in self.tensors)

    @cached_property
    def trainable(self) -> bool:
        """Return whether |w|_g = |w|; otherwise |w|_g = 0."""
        return any(t.trainable for t in self.tensors)

    @cached_property
    def device_update_s(self) -> float:
        """Return |w|_g / α_G."""
        return sum(t.device_update_s for t in self.tensors if t.trainable)

    @cached_property
    def cpu_update_s(self) -> float:
        """Return |w|_g / α_C."""
        return sum(t.cpu_update_s for t in self.tensors if t.trainable)

    @cached_property
    def pinned_bytes(self) -> int:
        """Return the bytes that never leave the device."""
        return sum(t.nbytes + t.state_bytes for t in self.pinned)

    @cached_property
    def pinned_update_s(self) -> float:
        """Return the seconds of the updates of pinned tensors."""
        return sum(t.device_update_s for t in self.pinned if t.trainable)


@dataclass(frozen=True)
class OffloadMachine:
    """The tiers and links of a machine.

    On a machine with a GPU the lower tier is the host, and there may be a disk behind it. On a CPU-only machine it is
    the disk, `host_bytes` is the room on it, and there is none behind.

    Attributes:
        device_bytes: the budget.
        fixed_bytes: the part of it in memory throughout and not counted elsewhere: buffers, inputs, staging.
        link: link between the device and the lower tier.
        host_bytes: room in the lower tier, without staging.
        disk: link between the host and the disk, or None.
        disk_bytes: room on that disk.
        management_s: H, what each step costs on the CPU before it can update anything; measured, may be 0.
    """

    device_bytes: int
    link: Link
    fixed_bytes: int = 0
    host_bytes: int = 1 << 62
    disk: Link | None = None
    disk_bytes: int = 1 << 62
    management_s: float = 0.0


@dataclass(frozen=True)
class OffloadProblem:
    """Everything that O-ILP needs to know.

    Raises:
        ValueError: blocks without options, groups that use unknown blocks or mix what changes and what does not.
    """

    blocks: tuple[OffloadBlock, ...]
    groups: tuple[ParameterGroup, ...]
    machine: OffloadMachine

    def __post_init__(self) -> None:
        for number, block in enumerate(self.blocks):
            if not block.options:
                raise ValueError(f"Block {number} has no options.")
        for group in self.groups:
            if not group.blocks or sorted(set(group.blocks)) != list(group.blocks):
                raise ValueError(f"Group {group.name}: its blocks must be ascending and distinct.")
            if group.blocks[0] < 0 or group.blocks[-1] >= len(self.blocks):
                raise ValueError(f"Group {group.name} uses a block that does not exist.")
            if len({(t.trainable, math.isinf(t.cpu_update_s)) for t in group.tensors}) > 1:
                raise ValueError(f"Group {group.name} mixes tensors that change or are updated in different ways.")
        if len({g.name for g in self.groups}) != len(self.groups):
            raise ValueError("Two groups have one name.")

    # Steps.

    @property
    def L(self) -> int:  # noqa: N802
        """Return the number of blocks."""
        return len(self.blocks)

    @property
    def steps(self) -> int:
        """Return 2L."""
        return 2 * len(self.blocks)

    def block_of(self, t: int) -> int:
        """Return B(t)."""
        return t if t < self.L else self.steps - 1 - t

    def backward(self, b: int) -> int:
        """Return the step of B_b; that of F_b is b."""
        return self.steps - 1 - b

    def uses(self, group: ParameterGroup) -> tuple[int, ...]:
        """Return the steps of blocks that use a group, ascending."""
        return tuple(sorted({t for b in group.blocks for t in (b, self.backward(b))}))

    def first_use(self, group: ParameterGroup) -> int:
        """Return f_w."""
        return group.blocks[0]

    def last_gradient(self, group: ParameterGroup) -> int:
        """Return g_w."""
        return self.backward(group.blocks[0])

    def after(self, start: int, end: int) -> tuple[int, ...]:
        """Return the steps t with start < t < end, cyclic; all others for start = end."""
        return tuple((start + k) % self.steps for k in range(1, (end - start - 1) % self.steps + 1))

    def may_update_on_cpu(self, group: ParameterGroup) -> bool:
        """Say whether X_w can be above 0.

        The gradient is offloaded at g_w or later, the update takes a later step, and the reload one after that, before
        f_w.
        """
        return group.trainable and math.isfinite(group.cpu_update_s) and group.blocks[0] >= 1


def group_parameters(
    tensors: Iterable[tuple[ParameterTensor, Iterable[int]]], *, smallest_bytes: int = 0
) -> tuple[ParameterGroup, ...]:
    """Group tensors by the exact set of blocks that use them, and by how they change.

    Args:
        tensors: each with the blocks that use it.
        smallest_bytes: smaller tensors are pinned (each transfer costs something besides its bytes).
    """
    found: dict[tuple[tuple[int, ...], bool, bool], tuple[list[ParameterTensor], list[ParameterTensor]]] = {}
    for tensor, blocks in tensors:
        key = (tuple(sorted(set(blocks))), tensor.trainable, math.isinf(tensor.cpu_update_s))
        moved, pinned = found.setdefault(key, ([], []))
        (pinned if tensor.nbytes < smallest_bytes else moved).append(tensor)
    return tuple(
        ParameterGroup(
            name="w" + "_".join(map(str, blocks)) + ("" if trainable else "_frozen") + ("_device" if no_cpu else ""),
            blocks=blocks,
            tensors=tuple(moved),
            pinned=tuple(pinned),
        )
        for (blocks, trainable, no_cpu), (moved, pinned) in sorted(found.items(), key=lambda item: item[0])
    )
