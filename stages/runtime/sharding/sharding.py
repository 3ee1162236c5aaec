"""Cuts the parameters of a model into shards, and puts whole ones together again.

While a step runs, a parameter's data is its shard, which the optimizer updates. Between steps the shard is kept here,
and the parameter is a stand-in of its whole shape, whose numbers cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stowage.stages.ir.collectives import ShardForm
from stowage.stages.ir.errors import ParameterError
from stowage.stages.runtime.offload.offloaded_tensor import OffloadedTensor, arrive, leave
from stowage.stages.runtime.offload.stand_ins import StandIns
from stowage.stages.runtime.offload.state_dicts import guard_module, guard_optimizer
from stowage.stages.runtime.sharding.failures import listed
from stowage.stages.runtime.sharding.memory import alone_with, memory_of, release, users_of
from stowage.stages.runtime.sharding.ranks import Ranks
from stowage.stages.runtime.sharding.under_way import UnderWay
from stowage.stages.structure.tree import ModuleTree

DEALT_OUT = "dealt out to ranks"


class Sharding:
    """The shards that this rank has of one model's parameters.

    Attributes:
        ranks: the processes that have the other shards.
        forms: how each parameter is cut, by name.
        gradients: while a step runs, this rank's own gradients that wait for more of them, whole, by parameter.
        under_way: while a step runs, the collectives that it has started and not waited for.

    Between steps such a gradient is in the parameter's `.grad`. While the parameter is a shard it cannot be there.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> None:
        """Learn the forms; nothing is cut or sent yet.

        Raises:
            ParameterError: a parameter has a gradient, or a state of the optimizer lies otherwise than its parameter.
        """
        self.ranks = ranks
        self._model = model
        self._tree = ModuleTree(model)
        self._optimizer = optimizer
        self._parameters = self._now()
        for name, parameter in self._parameters.items():
            self._check(name, parameter)
        self.forms: dict[str, ShardForm] = {}
        self._whole: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            self._learn(name, parameter)
        self.gradients: dict[str, torch.Tensor] = {}
        self.under_way = UnderWay()
        self._sharded = False
        self._shards: dict[str, torch.Tensor] = {}
        self._stand_ins = StandIns()
        self._guards: list[RemovableHandle] = []
        self._depth = 0
        self._raw = False

    def _now(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the model has now."""
        self._tree.look()
        return dict(self._tree.parameters)

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a parameter that cannot be cut together with its gradient and states."""
        if parameter.grad is not None:
            raise ParameterError(f"Parameter '{name}' has a gradient: set it to None before its model is sharded.")
        for key, state in self._states_of(parameter).items():
            if tuple(state.shape) == tuple(parameter.shape) and state.stride() != parameter.stride():
                raise ParameterError(
                    f"The optimizer's state '{key}' of parameter '{name}' lies otherwise in memory than the "
                    "parameter, so that shards of both would not belong together: pass an optimizer that has not "
                    "stepped yet."
                )

    def _learn(self, name: str, parameter: nn.Parameter) -> None:
        """Learn how a parameter is cut."""
        form = ShardForm.of(parameter.shape, parameter.stride(), self.ranks.count)
        if form is not None:
            self.forms[name] = form
            self._whole[name] = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
            )

    @property
    def sharded(self) -> bool:
        """Return whether the parameters hold shards now."""
        return self._sharded

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return whole parameters on the meta device, once the real ones hold shards."""
        if not self._sharded:
            return {}
        names = {id(p): name for name, p in self._parameters.items() if name in self._whole}
        known = {name: names[id(p)] for name, p in self._now().items() if id(p) in names}
        return {name: self._whole[before] for name, before in known.items()}

    def whole_layout(self, name: str) -> torch.Tensor:
        """Return the layout of one whole parameter, as a tensor on the meta device."""
        return self._whole[name]

    def shard(self) -> None:
        """Take rank 0's parameters, buffers and states, and keep a shard of each parameter and of its states."""
        if self._sharded:
            return
        for name, buffer in self._model.named_buffers():
            self.ranks.broadcast(buffer, f"buffer '{name}' of rank 0")
        for name, parameter in self._parameters.items():
            self._share(name, parameter)
            if name in self._shards:
                parameter.data = self._stand_in(name)
                leave(parameter, name, DEALT_OUT)
        self._sharded = True
        self._guard()

    def _share(self, name: str, parameter: nn.Parameter) -> None:
        """Take rank 0's content of a parameter and its states, and keep a shard of each."""
        held = parameter.detach()
        self._cut_states(name, parameter)
        self.ranks.broadcast(held, f"parameter '{name}' of rank 0")
        if name in self.forms:
            self._shards[name] = self.cut(name, held)

    def _guard(self) -> None:
        """Let `state_dict` of model and optimizer refuse, of all parts that the model has now."""
        for guard in self._guards:
            guard.remove()
        self._guards = guard_module(self._model, self._first_cut, DEALT_OUT)
        if self._optimizer is not None:
            self._guards += guard_optimizer(self._optimizer, self._first_cut_state, DEALT_OUT)

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the names of parameters that the model has lost since they were cut, and of those that are new."""
        now = self._now() if self._sharded else self._parameters
        gone = [name for name, parameter in self._parameters.items() if now.get(name) is not parameter]
        return gone, [name for name, parameter in now.items() if self._parameters.get(name) is not parameter]

    def follow_model(self) -> None:
        """Give back whole what the model has lost, and cut what is new; all ranks call this inside, shards in memory.

        Raises:
            ParameterError: a new parameter has a gradient, or a state of the optimizer lies otherwise than it.
        """
        now = self._now()
        gone, new = self.changes()
        lost = {id(self._parameters[name]) for name in gone}
        for name in new:
            if id(now[name]) not in lost:  # one that has another name now has been cut before
                self._check(name, now[name])
        for name in gone:
            if name in self._shards:
                self._give_back(name)
            if name in self.gradients:
                self._parameters[name].grad = self.gradients.pop(name)
            self.forms.pop(name, None)
            self._whole.pop(name, None)
        self._parameters = now
        for name in new:
            self._learn(name, now[name])
            self._share(name, now[name])
            if name in self._shards:
                now[name].data = self._shards[name]
        self._guard()

    def undo(self) -> None:
        """Make parameters and states whole again, for good; all ranks call this inside, with shards in memory."""
        for name in list(self._shards):
            self._give_back(name)
        for name in list(self.gradients):
            self._parameters[name].grad = self.gradients.pop(name)
        for guard in self._guards:
            guard.remove()
        self._guards = []
        self._sharded = False

    def _give_back(self, name: str) -> None:
        """Make one parameter and its states whole again."""
        parameter = self._parameters[name]
        for key, state in self._states_of(parameter).items():
            if tuple(state.shape) == self.forms[name].shape:
                assert self._optimizer is not None
                self._optimizer.state[parameter][key] = self._own(name, state)
        parameter.data = self._own(name, parameter.detach())
        del self._shards[name]

    def _own(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor without the padding at the end of what is gathered."""
        like = self._whole[name]
        own = torch.empty_strided(like.shape, like.stride(), dtype=shard.dtype, device=shard.device)
        return own.copy_(self.whole(name, shard))

    def _states_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the tensors that the optimizer keeps of a parameter."""
        found = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
        return {key: state for key, state in found.items() if isinstance(state, torch.Tensor)}

    def _cut_states(self, name: str, parameter: nn.Parameter) -> None:
        """Take rank 0's states of a parameter, those that an optimizer makes when it is made, and keep shards."""
        for key, state in self._states_of(parameter).items():
            sent = state.to(parameter.device)  # numbers of steps are in the host's memory, which NCCL does not reach
            self.ranks.broadcast(sent, f"state '{key}' of parameter '{name}' of rank 0")
            if sent is not state:
                state.copy_(sent)
            if name in self.forms and tuple(state.shape) == tuple(parameter.shape):
                assert self._optimizer is not None
                self._optimizer.state[parameter][key] = self.cut(name, state)

    def _first_cut(self, module: nn.Module) -> str | None:
        own = {id(p) for p in module.parameters() if isinstance(p, OffloadedTensor)}
        return next((name for name in self.forms if id(self._parameters[name]) in own), None)

    def _first_cut_state(self, optimizer: torch.optim.Optimizer) -> str | None:
        if self._raw:
            return None
        cut = {n: p for n, p in self._parameters.items() if n in self.forms and isinstance(p, OffloadedTensor)}
        for name, parameter in cut.items():
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and tuple(state.shape) == self.forms[name].shape:
                    return f"{name}::{key}"
        return None

    @contextmanager
    def raw_states(self) -> Iterator[None]:
        """Let the optimizer's `state_dict` give shards inside, and `load_state_dict` replace them."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let parameters hold their shards inside."""
        if self._sharded and not self._depth:
            self._enter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._sharded and not self._depth:
                self._leave()

    def _enter(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.gradients[name], parameter.grad = parameter.grad, None
        for name, shard in self._shards.items():
            arrive(self._parameters[name])
            self._parameters[name].data = shard
            if isinstance(shard, OffloadedTensor):
                leave(self._parameters[name], name)
        self._stand_ins.release()

    def _leave(self) -> None:
        for name in self._shards:
            parameter = self._parameters[name]
            is_offloaded = isinstance(parameter, OffloadedTensor)
            arrive(parameter)
            self._shards[name] = parameter.data
            if is_offloaded:
                leave(self._shards[name], name)
            parameter.grad = None
            parameter.data = self._stand_in(name)
            leave(parameter, name, DEALT_OUT)
        for name in list(self.gradients):
            self._parameters[name].grad = self.gradients.pop(name)

    def _stand_in(self, name: str) -> torch.Tensor:
        """Return a tensor of a parameter's whole shape without numbers."""
        return self._stand_ins.of(name, self._whole[name], self._parameters[name].device)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters, by name."""
        return dict(self._parameters)

    def waits(self) -> bool:
        """Return whether gradients of earlier micro-batches wait."""
        return bool(self.gradients) or any(p.grad is not None for p in self._parameters.values())

    def follow_first(self) -> None:
        """Take the buffers of rank 0, as DistributedDataParallel does before a forward.

        It does not for a forward that follows one whose gradients were not exchanged.
        """
        for name, buffer in self._model.named_buffers() if not self.waits() else ():
            self.ranks.broadcast(buffer, f"buffer '{name}' of rank 0")

    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards as they are kept between steps."""
        return dict(self._shards)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole tensor of the parameter's layout, padded with zeros."""
        return cut(self.forms[name], whole, self.ranks.rank)

    def start(self, names: Sequence[str], shards: Sequence[torch.Tensor]) -> Gather:
        """Start the gather of some parameters' shards."""
        return Gather(self, names, shards)

    def whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor of a parameter's layout from the shards of all ranks, which all call this."""
        return self.start([name], [shard]).finish()[0]


class Gather:
    """A gather under way."""

    def __init__(self, sharding: Sharding, names: Sequence[str], shards: Sequence[torch.Tensor]) -> None:
        self._sharding = sharding
        self._names = list(names)
        flats = [memory_of(shard) for shard in shards]
        own = flats[0] if len(flats) == 1 else torch.cat(flats)
        self._sizes = [flat.numel() for flat in flats]
        self._buffer = own.new_empty(own.numel() * sharding.ranks.count)
        self._users = users_of(self._buffer)
        self._own = own if own.device.type != "cpu" else None  # it may be read until the end
        self._work = sharding.ranks.gather(self._buffer, own, f"the gather of {listed(names)}")

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return the whole tensors."""
        self._work.wait()
        if len(self._names) == 1:
            alone_with(self._buffer, self._users)
            return [self._windowed(self._names[0], self._buffer)]
        by_rank = self._buffer.view(self._sharding.ranks.count, -1)
        found, begin = [], 0
        for name, size in zip(self._names, self._sizes):
            whole = self._buffer.new_empty(size * self._sharding.ranks.count)
            whole.view(self._sharding.ranks.count, size).copy_(by_rank[:, begin : begin + size])
            found.append(self._windowed(name, whole))
            begin += size
        release(self._buffer)
        return found

    def _windowed(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        like = self._sharding.whole_layout(name)
        return flat.as_strided(like.shape, like.stride())


class Scatter:
    """A scatter under way: the mean of gradients over all ranks, of which each rank keeps its shards."""

    def __init__(self, sharding: Sharding, gradients: Mapping[str, torch.Tensor]) -> None:
        self._forms = [sharding.forms[name] for name in gradients]
        self._rank, ranks = sharding.ranks.rank, sharding.ranks.count
        first = next(iter(gradients.values()))
        total = sum(form.shard_elements for form in self._forms)
        self._buffer = first.new_empty(total * ranks)
        # Taken now, as the plan counts them, so that no wait lacks memory.
        self._shards = [first.new_empty(form.shard_elements) for form in self._forms]
        by_rank, begin = self._buffer.view(ranks, total), 0
        for (name, gradient), form in zip(gradients.items(), self._forms, strict=True):
            like = sharding.whole_layout(name)
            whole = self._buffer if len(gradients) == 1 else first.new_empty(form.padded_elements)
            whole[form.elements :].zero_()
            # Divided before it is added, as DistributedDataParallel does.
            torch.mul(gradient, 1.0 / ranks, out=whole.as_strided(like.shape, like.stride()))
            if whole is not self._buffer:
                by_rank[:, begin : begin + form.shard_elements].copy_(whole.view(ranks, -1))
            del whole  # before the next one is made
            begin += form.shard_elements
        what = f"the scatter of the gradients of {listed(list(gradients))}"
        self._work = sharding.ranks.reduce(self._buffer, what)

    def finish(self) -> list[torch.Tensor]:
        """Wait, and return this rank's shards."""
        self._work.wait()
        total = sum(form.shard_elements for form in self._forms)
        own, found, begin = self._buffer.view(-1, total)[self._rank], [], 0
        for form, shard in zip(self._forms, self._shards, strict=True):
            shard.copy_(own[begin : begin + form.shard_elements])
            found.append(shard.as_strided(form.shape, form.stride))
            begin += form.shard_elements
        self._shards.clear()
        release(self._buffer)
        return found


def cut(form: ShardForm, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a copy of a rank's shard of a whole tensor, padded with zeros."""
    flat, begin = memory_of(whole), rank * form.shard_elements
    own = flat[begin : begin + form.shard_elements]
    shard = flat.new_zeros(form.shard_elements)
    shard[: own.numel()].copy_(own)
    return shard.as_strided(form.shape, form.stride)


def shard_forms(parameters: Mapping[str, torch.Tensor], ranks: int) -> dict[str, ShardForm]:
    """Return how each parameter is cut; those without elements are not."""
    found = {name: ShardForm.of(p.shape, p.stride(), ranks) for name, p in parameters.items()}
    return {name: form for name, form in found.items() if form is not None}
