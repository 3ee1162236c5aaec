"""Talks to the other ranks of a run outside of steps: measures rates, hands out objects, compares them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stowage.stages.device import device_of
from stowage.stages.device.rates.collectives import CollectiveRates, measure_collectives, start_gather
from stowage.stages.device.tiers.layout import is_dense
from stowage.stages.ir.errors import ParameterError, RankError
from stowage.stages.runtime.sharding.failures import AGAIN, Failures
from stowage.stages.runtime.sharding.memory import each_once, memory_of
from stowage.stages.runtime.sharding.rates import place_of, remember, remembered

Found = TypeVar("Found")

PULSE_S = 5.0
"""While the first rank works alone, the others hear from it so often: no collective of theirs times out meanwhile."""


class Collective:
    """A collective under way."""

    def __init__(self, works: Sequence[Any], failures: Failures, what: str, device: torch.device) -> None:
        self._works = works
        self._device = device
        self._failures = failures
        self._what = what

    def wait(self) -> None:
        """Wait until what it writes can be read: on a GPU, by what is queued from now on.

        Raises:
            RankError: another rank has ended, hangs, or has failed.
        """
        with self._failures.named(self._what):
            for work in self._works:
                work.wait()
        self._works = ()
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._failures.watch.until(event, self._what)


class Ranks:
    """The processes that train one model together.

    Attributes:
        group: the process group.
        count: number of ranks.
        rank: this process's own.
        failures: what has been heard of ranks that are lost.

    What is exchanged has a name, `what`, which errors state.
    """

    def __init__(self, group: Any, again: str = AGAIN) -> None:
        """Take a group; `again` says in errors what is to be done once ranks are lost."""
        self.group = group
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.failures = Failures(group if group is not None else dist.group.WORLD, self.rank, again)
        self._first = self._global(0)
        self._rates: CollectiveRates | None = None

    def from_first(self, make: Callable[[], Found], what: str = "what rank 0 decides") -> Found:
        """Return what rank 0 makes, on all ranks; an error that it raises is raised on all."""
        content: list[Any] = [None]
        stopped: BaseException | None = None
        if self.rank == 0:
            with self._pulse(what):
                try:
                    content = [(True, make())]
                except Exception as error:
                    stopped = error
                    content = [(False, (type(error), error.args, vars(error)))]
                except BaseException as error:
                    stopped = error
                    text = f"The first rank was stopped ({type(error).__name__}) while the others waited for it."
                    content = [(False, (RankError, (text,), {}))]
        else:
            self._listen(what)
        with self.failures.named(what):
            dist.broadcast_object_list(content, src=self._first, group=self.group)
        if stopped is not None:
            raise stopped
        made, found = content[0]
        if not made:
            kind, arguments, attributes = found
            raised = kind.__new__(kind, *arguments)  # its own constructor may want other arguments
            raised.args = arguments
            vars(raised).update(attributes)
            raise raised
        result: Found = found
        return result

    @contextlib.contextmanager
    def _pulse(self, what: str) -> Iterator[None]:
        """Tell the other ranks now and then that this one is at work, then that it is done."""
        done = threading.Event()

        def tell() -> None:
            ended = False
            while not ended:
                ended = done.wait(PULSE_S)
                self._beat(what, ended)

        teller = threading.Thread(target=tell, name="stowage-pulse", daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    def _listen(self, what: str) -> None:
        """Wait until rank 0 is done."""
        while not self._beat(what, False):
            pass

    def _beat(self, what: str, ended: bool) -> bool:
        flag = torch.tensor(int(ended), device=self.place())
        with self.failures.named(what):
            dist.broadcast(flag, src=self._first, group=self.group)
        return bool(flag.item())

    def place(self) -> torch.device:
        """Return where tensors are that the group's backend takes."""
        backend = str(dist.get_backend(self.group))
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def all(self, own: Found, what: str = "what all ranks report") -> list[Found]:
        """Return what all ranks give, in their order."""
        found: list[Any] = [None] * self.count
        with self.failures.named(what):
            dist.all_gather_object(found, own, group=self.group)
        return found

    def same(self, number: int, what: str) -> bool:
        """Return whether all ranks give the same number of at most 63 bits."""
        own, found = self._numbers[:1], self._numbers[1:]
        own.fill_(number)
        with self.failures.named(what):
            dist.all_gather(list(found.chunk(self.count)), own, group=self.group)
        return found.eq(own).all().item() is True

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """Room for a number of this rank's and one of each: gloo would free what is new for each comparison late."""
        return torch.empty(1 + self.count, dtype=torch.int64, device=self.place())

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite a tensor by rank 0's, and nothing that lies between its elements."""
        with self.failures.named(what), torch.no_grad():
            if is_dense(tensor):
                dist.broadcast(memory_of(tensor), src=self._first, group=self.group)
                return
            own = each_once(tensor)  # backends move as many elements as it has, from its first one on
            sent = own.clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent, src=self._first, group=self.group)
            own.copy_(sent)

    def add(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite a tensor by the sum of all ranks'."""
        with self.failures.named(what):
            dist.all_reduce(tensor, group=self.group)

    def sums(self, numbers: list[float], what: str) -> list[float]:
        """Return the sum of each number over all ranks, the same on all."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self.place())
        self.add(found, what)
        return found.tolist()

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, what: str) -> Collective:
        """Start filling a flat tensor with the flat shards of all ranks, in their order."""
        with self.failures.named(what):
            return Collective(start_gather(whole, shard, self.group), self.failures, what, whole.device)

    def reduce(self, whole: torch.Tensor, what: str) -> Collective:
        """Start the sum of a flat tensor over all ranks; each rank's own part of it is valid afterwards, no other."""
        with self.failures.named(what):
            return Collective(self._reduce(whole), self.failures, what, whole.device)

    def _reduce(self, whole: torch.Tensor) -> list[Any]:
        parts = list(whole.chunk(self.count))
        if whole.device.type != "cpu":
            start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return [start(parts[self.rank], whole, group=self.group, async_op=True)]
        return [dist.reduce(p, self._global(r), group=self.group, async_op=True) for r, p in enumerate(parts)]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank

    def rates(self, device: torch.device, folder: Path | None = None) -> CollectiveRates:
        """Return what collectives take, measured once: the same numbers on all ranks.

        Args:
            device: where this rank computes.
            folder: where rank 0 remembers them for later runs on such devices; None to measure in each run.
        """
        if self._rates is None:
            self._rates = self.measured(CollectiveRates, lambda: self._probed(device), device, folder)
        return self._rates

    def _probed(self, device: torch.device) -> CollectiveRates:
        with self.failures.named("probes of the rates of collectives"):
            return measure_collectives(self.group, device)

    def measured(
        self,
        record: type[Found],
        measure: Callable[[], Found],
        device: torch.device,
        folder: Path | None,
        what: str = "",
    ) -> Found:
        """Return what ranks measure together, or what is remembered of that: what rank 0 has, on all ranks.

        Args:
            record: the class of what is measured.
            measure: measures it; all ranks call it, where nothing is remembered.
            device: where this rank computes.
            folder: where rank 0 remembers it for later runs on such devices; None to measure in each run.
            what: its name among what is remembered, the same on all ranks.
        """
        member = socket.gethostname(), device_of(device).fingerprint()
        members = self.all(member, "what ranks run on")
        place = place_of(folder, str(dist.get_backend(self.group)), members, what) if folder is not None else None
        found = self.from_first(lambda: remembered(place, record) if place is not None else None)
        if found is not None:
            return found
        own = measure()

        def kept() -> Found:
            if place is not None:
                remember(place, own)
            return own

        return self.from_first(kept)


def ranks_of(group: Any) -> Ranks | None:
    """Return the processes of a group; None without one, or where there is one process only.

    Raises:
        ParameterError: it is no process group, or this process is not in it.
    """
    ranks = Ranks(own_group(group)) if group is not None else None
    return ranks if ranks is not None and ranks.count > 1 else None


def own_group(group: Any) -> dist.ProcessGroup:
    """Return a process group that this process is in.

    Raises:
        ParameterError: it is none, or this process is not in it.
    """
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise ParameterError(
            f"group is {ascii(group)[:60]}, which is no process group: pass torch.distributed.group.WORLD, or what "
            "new_group returns."
        )
    if outside or dist.get_rank(group) < 0:
        raise ParameterError(
            "This process is not in group: call it on the ranks of the group alone, or leave group out to train here "
            "by itself."
        )
    found: dist.ProcessGroup = group
    return found
