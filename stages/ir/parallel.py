"""Describes a parallel machine, groups of parameters that are sharded together, and where each group's shards live.

All ranks have the same devices and run the same plan. A group is what FSDP2 gathers in one collective; Elixir calls it
a chunk (Elixir, section 3). A group whose shards live in the host is updated there, by the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelMachine:
    """A machine of `ranks` equal devices that share one host.

    Attributes:
        name: for people.
        ranks: number of devices, one process each (Elixir's n).
        device_bytes: memory of one device.
        host_bytes: memory of the host, for all ranks together.
        collective_bytes_per_s: bytes that one rank receives per second in an all-gather, or sends in a reduce-scatter;
            a gather of B bytes takes `collective_latency_s + B · (n − 1)/n / collective_bytes_per_s`.
        collective_latency_s: time of a collective of no bytes.
        reload_bytes_per_s: from the host to the devices, all ranks together (B_c2g(n)).
        offload_bytes_per_s: from the devices to the host, all ranks together (B_g2c(n)).
        duplex_bytes_per_s: both directions at once, all ranks together.
        device_updates_per_s: scalar parameters that all devices together update per second (V_g(n)).
        host_updates_per_s: scalar parameters that the host updates per second while all ranks ask for it (V_c(n)).
        collectives_share_link: collectives pass over the link that copies to and from the host use (PCIe without
            NVLink), so that both slow each other down.
        collective_slowdown: by which share of a collective's time computing beside it takes longer, as the collective's
            kernels take processors and memory bandwidth of the device.
    """

    name: str
    ranks: int
    device_bytes: int
    host_bytes: int
    collective_bytes_per_s: float
    collective_latency_s: float
    reload_bytes_per_s: float
    offload_bytes_per_s: float
    duplex_bytes_per_s: float
    device_updates_per_s: float
    host_updates_per_s: float
    collectives_share_link: bool = False
    collective_slowdown: float = 0.0

    def collective_s(self, nbytes: int) -> float:
        """Return the time of gathering, or of reducing and scattering, `nbytes` (of the whole, not of a shard)."""
        if self.ranks == 1:
            return 0.0
        return self.collective_latency_s + nbytes * (self.ranks - 1) / self.ranks / self.collective_bytes_per_s


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are gathered together, and the part of the step that reads them.

    Attributes:
        group: position in the order of first use in forward.
        modules: paths of the modules whose parameters they are; `fully_shard` takes these modules as one group.
        parameters: names, in the order of first use.
        elements: scalar parameters, all of them.
        trainable: scalar parameters that have a gradient.
        stored_bytes: bytes of one element as it is stored between steps, and updated (4 for a float32 master).
        compute_bytes: bytes of one element as it is gathered and computed with (2 for bfloat16).
        state_bytes: bytes of optimizer states for one trainable element.
        forward_s, backward_s: time of the group's part of forward and of backward (with recomputation inside it).
        saved_bytes: bytes that its forward keeps for its backward, and what the model itself keeps between this group's
            forward and the next group's.
        forward_peak_bytes, backward_peak_bytes: most bytes of activations and workspace in its parts, beside what
            earlier groups have saved, and beside parameters and gradients; but gradients of the root, which wait for
            the end of backward, are in the backward peaks of all others.
        segment: number of the checkpointed segment that it belongs to, -1 where none: all groups of one segment are
            needed at the same time in backward (Elixir, A.3).
        backward_with_gradients_bytes: most bytes in its part of backward of what `backward_peak_bytes` counts and of
            gradients of its own parameters together; at most their sum. 0 where only the sum is known.
        first_saved_bytes: of the root, the part of `saved_bytes` that is there while the other groups run.
        entering_bytes: bytes that are there when it is gathered in forward, beside what earlier groups have saved.
        incoming_bytes: bytes that are there when it is gathered in backward, beside what it and earlier groups have
            saved: gradients of what it has returned, and gradients of the root that wait. Its backward peaks count
            them too. Negative where more of what it has saved is freed by then, such as what a last norm has read.
        leaving_bytes: bytes that are there when its backward has ended and its gradients are reduced, beside what
            earlier groups have saved.
        end_peak_bytes: of the root, most bytes after the backward of all others, with all of its own gradients that
            are there; 0 where nothing is computed then.
        last_trainable: scalar parameters of the last of its parameters that has a gradient, in FSDP2's order: FSDP2
            frees that gradient after the reduction, all others before it.
        after_root: 0 where FSDP2 frees its weights and reduces its gradients as its own part of backward ends. Where
            nothing that it reads needs a gradient, FSDP2 is not told of that end, and does so after the root: its turn
            among such groups, from 1.
        idle_in_backward: nothing that it returns needs a gradient, so that it is not gathered in backward.
        reduce_bytes: bytes of one element of a gradient as it is reduced, where a policy of mixed precision says so; 0
            for `compute_bytes`.
        casts_gradients: what a rank keeps of the reduced gradients is cast to the type of the stored weights.
        largest_cast: scalar parameters of the largest of its parameters that is cast for each gather; 0 where none is.
        update_bytes: most bytes beside parameters, gradients and states while one of its parameters is updated, of all
            ranks together; known under a policy of mixed precision, whose activations may be less than that.

    A group whose `modules` hold the empty path is the root: what no other group has, tied weights among them. It is
    used at both ends of the model, so that its gathered weights stay from its forward to the end of backward.
    """

    group: int
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int
    trainable: int
    stored_bytes: int
    compute_bytes: int
    state_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    segment: int = -1
    backward_with_gradients_bytes: int = 0
    first_saved_bytes: int = 0
    entering_bytes: int = 0
    incoming_bytes: int = 0
    leaving_bytes: int = 0
    end_peak_bytes: int = 0
    last_trainable: int = 0
    after_root: int = 0
    idle_in_backward: bool = False
    reduce_bytes: int = 0
    casts_gradients: bool = False
    largest_cast: int = 0
    update_bytes: int = 0

    @property
    def is_root(self) -> bool:
        """Return whether it is the model's own group (FSDP2's root)."""
        return "" in self.modules

    @property
    def reduced_bytes(self) -> int:
        """Return the bytes of one element of a gradient as it is reduced."""
        return self.reduce_bytes or self.compute_bytes


@dataclass(frozen=True)
class GroupChoice:
    """Where a group's shards live and whether its gathered weights stay from forward to backward.

    Attributes:
        group: the group.
        on_host: its shards, gradients and states live in the host, where the CPU updates them; otherwise on the device.
        keep: gathered weights stay on the device between forward and backward (no resharding after forward).
    """

    group: int
    on_host: bool
    keep: bool
