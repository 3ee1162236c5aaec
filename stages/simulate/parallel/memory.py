"""Replays what a rank has in memory during a step under FSDP2, allocation by allocation, for a choice of each group.

What FSDP2 does, as its code has it, on the memory of one device:

- Gathering a group makes a flat buffer that all ranks' shards arrive in, and then the whole weights that are copied out
  of it. In forward the buffer stays until the next group's weights are copied out; in backward it is freed at once.
- Under a policy of mixed precision a rank casts its shard of the weights first, all of it at once, and the cast shard
  stays until the gather has ended. One rank alone gathers nothing, and casts one parameter after the other.
- Gloo, the engine of collectives on a CPU, makes a copy of what it gathers and of what it reduces while it works.
- When a group's part of backward has ended, its weights are freed, unless the group is the last; then all its gradients
  are copied into a buffer to be reduced, in the type that they are reduced in, the gradients are freed, and the buffer
  stays until the next group is reduced. A rank's part of the sum is then cast to the type of the stored weights.
- What a backward function of PyTorch reads and makes stays until it returns (`partition.group_lives`).
- The last gradient of a group is freed after the reduction: FSDP2 goes through all of them and keeps hold of that one.
- A group that reads nothing which needs a gradient, such as an embedding, keeps its weights and gradients until the
  root has been reduced. One that returns nothing which needs a gradient is not gathered in backward.
- What a rank keeps of the gradients stays until the optimizer has used it, one parameter after the other.
- Where it gathers and reduces, there is more than what forward has saved: what has just been computed,
  gradients of what a group has returned, gradients of the root, which wait for the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stowage.stages.ir.parallel import GroupChoice, ParameterGroup


@dataclass(frozen=True)
class RankMemory:
    """What one rank needs.

    Attributes:
        device_bytes: most bytes on its device.
        moment: when that is, for people.
        host_bytes: bytes of its shards, gradients and states in the host.
    """

    device_bytes: int
    moment: str
    host_bytes: int


@dataclass(frozen=True)
class RankRules:
    """How FSDP2 runs.

    Attributes:
        ranks: number of ranks.
        prefetch: groups that are gathered ahead of their use.
        copies: collectives copy what they work on, as gloo does.
        host_is_device: the device is a CPU, so that what lives in the host takes the device's own memory.
        accumulated: shards of gradients of earlier micro-batches are in memory from the start.
    """

    ranks: int
    prefetch: int = 1
    copies: bool = False
    host_is_device: bool = False
    accumulated: bool = False


def rank_memory(
    groups: Sequence[ParameterGroup],
    choices: Sequence[GroupChoice],
    rules: RankRules,
    *,
    fixed_bytes: int = 0,
) -> RankMemory:
    """Replay one step.

    Args:
        groups: all groups, in the order of forward, the model's own first.
        choices: a choice for each.
        rules: how FSDP2 runs.
        fixed_bytes: whatever else is on the device: buffers, the batch.
    """
    replay = _Replay(groups, choices, rules, fixed_bytes)
    replay.forward()
    replay.backward()
    host = sum(replay.shard(g) + replay.states(g) + replay.shard_of_gradients(g) for g in groups if replay.on_host(g))
    return RankMemory(replay.peak, replay.moment, host)


class _Replay:
    def __init__(
        self, groups: Sequence[ParameterGroup], choices: Sequence[GroupChoice], rules: RankRules, fixed_bytes: int
    ) -> None:
        self._root = next((g for g in groups if g.is_root), None)
        self._order = [g for g in groups if not g.is_root]
        self._choice = {g.group: c for g, c in zip(groups, choices, strict=True)}
        self._rules = rules
        self.now = fixed_bytes + sum(self.shard(g) + self.states(g) for g in groups if not self.on_host(g))
        if rules.accumulated:
            self.now += sum(self.shard_of_gradients(g) for g in groups if not self.on_host(g))
        self.peak, self.moment = self.now, "between steps"
        self._arriving: dict[int, int] = {}
        """Flat buffers that shards arrive in, by group."""
        self._lingering = 0
        """Flat buffer that stays until the next group's weights are copied out."""
        self._whole: set[int] = set()
        self._reducing = 0
        self._counted = 0

    def on_host(self, g: ParameterGroup) -> bool:
        return self._choice[g.group].on_host and not self._rules.host_is_device

    def shard(self, g: ParameterGroup) -> int:
        return -(-g.elements * g.stored_bytes // self._rules.ranks)

    def states(self, g: ParameterGroup) -> int:
        return -(-g.trainable * g.state_bytes // self._rules.ranks)

    def shard_of_gradients(self, g: ParameterGroup) -> int:
        return -(-g.trainable * g.stored_bytes // self._rules.ranks)

    def _touch(self, extra: int, moment: str, g: ParameterGroup) -> None:
        if self.now + extra > self.peak:
            self.peak, self.moment = self.now + extra, f"{moment} {' + '.join(m or 'the model' for m in g.modules)}"

    def _ask(self, g: ParameterGroup) -> None:
        """Begin to gather a group."""
        if g.group in self._whole or g.group in self._arriving or not g.elements:
            return
        size = g.elements * g.compute_bytes
        copied = self.shard(g) if self.on_host(g) else 0
        if self._rules.ranks == 1:
            self._arriving[g.group] = 0
            self._touch(0 if g.largest_cast else copied, "gathering", g)
            return
        self._arriving[g.group] = size
        self.now += size
        collective = size if self._rules.copies else 0
        if g.largest_cast:
            cast = -(-size // self._rules.ranks)
            before = copied + cast - size  # the buffer is not there yet
            self._touch(max(before, cast + collective), "gathering", g)
        else:
            self._touch(max(copied, collective), "gathering", g)

    def _have(self, g: ParameterGroup, *, linger: bool) -> None:
        """Wait until a group has arrived and copy its weights out."""
        if g.group not in self._arriving:
            return
        buffer = self._arriving.pop(g.group)
        if linger:
            self.now -= self._lingering
            self._lingering = 0
        self.now += g.elements * g.compute_bytes
        self._whole.add(g.group)
        self._touch(self._cast_alone(g), "copying out", g)
        if linger:
            self._lingering = buffer
        else:
            self.now -= buffer

    def _cast_alone(self, g: ParameterGroup) -> int:
        """Return the bytes that one rank alone needs to cast a parameter, beside the whole weights."""
        width = g.compute_bytes + (g.stored_bytes if self.on_host(g) else 0)
        return g.largest_cast * width if self._rules.ranks == 1 else 0

    def _let_go(self, g: ParameterGroup) -> None:
        if g.group in self._whole:
            self._whole.discard(g.group)
            self.now -= g.elements * g.compute_bytes

    def forward(self) -> None:
        if self._root is not None:
            self._ask(self._root)
            self._have(self._root, linger=True)
            self._ahead(self._order[: self._rules.prefetch])
            self.now += self._root.first_saved_bytes
        for i, g in enumerate(self._order):
            self._count(g.entering_bytes)
            self._ask(g)
            self._have(g, linger=True)
            self._ahead(self._order[i + 1 : i + 1 + self._rules.prefetch])
            self._count(0)
            self._touch(g.forward_peak_bytes, "forward of", g)
            if not self._choice[g.group].keep:
                self._let_go(g)
            self.now += g.saved_bytes
        if self._root is not None:
            rest = self._root.saved_bytes - self._root.first_saved_bytes
            self._touch(self._root.forward_peak_bytes - self._root.first_saved_bytes, "forward of", self._root)
            if not self._choice[self._root.group].keep:
                self._let_go(self._root)
            self.now += rest
        self.now -= self._lingering
        self._lingering = 0

    def backward(self) -> None:
        backwards = self._order[::-1]
        if self._root is not None:
            self._ask(self._root)
            self._have(self._root, linger=False)
            self._ahead(backwards[: self._rules.prefetch])
            self.now -= self._root.saved_bytes - self._root.first_saved_bytes
            self._touch(self._root.backward_peak_bytes - self._root.first_saved_bytes, "loss of", self._root)
        for i, g in enumerate(backwards):
            self._count(g.incoming_bytes)
            if not g.idle_in_backward:
                self._begin(g, backwards[i:])
            self.now -= g.saved_bytes
            self._count(0)
            self._touch(_with_gradients(g), "backward of", g)
            self._count(g.leaving_bytes)
            if g.after_root:
                self.now += _gradients(g)
            else:
                self._reduce(g)
        self._count(0)
        if self._root is not None:
            self.now -= self._root.first_saved_bytes
            self._touch(max(_gradients(self._root), self._root.end_peak_bytes), "end of", self._root)
            self._reduce(self._root)
        for g in sorted((g for g in self._order if g.after_root), key=lambda g: g.after_root):
            self.now -= _gradients(g)
            self._reduce(g)
            self.now -= self._arriving.pop(g.group, 0)  # gathered ahead, though idle
        self.now -= self._reducing
        self._reducing = 0
        for g in (*self._order, *([self._root] if self._root is not None else [])):
            if g.update_bytes and not self.on_host(g):
                self._touch(-(-g.update_bytes // self._rules.ranks), "update of", g)

    def _begin(self, g: ParameterGroup, left: Sequence[ParameterGroup]) -> None:
        """Gather what a group's part of backward needs, and the groups ahead of it.

        Args:
            g: the group.
            left: it and the groups whose part of backward comes after its own, in that order.
        """
        for other in [o for o in left if g.segment >= 0 and o.segment == g.segment] or [g]:
            self._ask(other)
            self._have(other, linger=False)
        self._ahead(left[1 : 1 + self._rules.prefetch])

    def _count(self, nbytes: int) -> None:
        """Count what is there at this moment beside what forward has saved, and no longer what was there before."""
        self.now += nbytes - self._counted
        self._counted = nbytes

    def _ahead(self, groups: Sequence[ParameterGroup]) -> None:
        for g in groups:
            self._ask(g)

    def _reduce(self, g: ParameterGroup) -> None:
        self._let_go(g)
        self.now -= self._reducing
        gradients = _gradients(g)
        self._reducing = g.trainable * g.reduced_bytes
        if not gradients:
            return
        self.now += self._reducing
        self._touch(gradients, "reducing", g)
        kept = self.shard_of_gradients(g)
        several = self._rules.ranks > 1
        copied = self._reducing if self._rules.copies and several else 0
        last = _last_gradient(g) if several else 0
        if g.casts_gradients:
            part = -(-self._reducing // self._rules.ranks)
            self._touch(part + max(copied, kept) + last, "reducing", g)
        else:
            self._touch(kept + copied + last, "reducing", g)
        if not self.on_host(g) and not self._rules.accumulated:
            self.now += kept


def _gradients(g: ParameterGroup) -> int:
    return g.trainable * g.compute_bytes


def _last_gradient(g: ParameterGroup) -> int:
    return g.last_trainable * g.compute_bytes


def _with_gradients(g: ParameterGroup) -> int:
    both = g.backward_peak_bytes + _gradients(g)
    return min(both, g.backward_with_gradients_bytes or both)
