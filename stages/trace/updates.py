"""Appends what happens to gradients as calls, and optimizer states as storages.

The calls are additions to waiting gradients, clipping, and one `stowage.update` for each parameter that has a gradient,
or one `stowage.update_all`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stowage.stages.ir.collectives import SCATTER, collective_signature, scatter_arguments
from stowage.stages.ir.errors import TraceError
from stowage.stages.ir.freezable import UnitKind
from stowage.stages.ir.trace import Call, Gradient, Storage, Value
from stowage.stages.ir.units import Unit, bits_of
from stowage.stages.ir.updates import (
    ADD,
    CLIP,
    NORM,
    SCALE,
    UPDATE,
    UPDATE_ALL,
    UpdateRule,
    clip_arguments,
    joint_arguments,
    state_name,
    update_arguments,
)
from stowage.stages.optimizers import KnownOptimizer, StateForm
from stowage.stages.rewrite.buckets import BUCKET_BYTES, gradient_buckets
from stowage.stages.trace.calls.signature import call_signature
from stowage.stages.trace.checks import check_gradient_hooks, check_optimizer


@dataclass(frozen=True)
class MicroBatch:
    """Says what one iteration does with gradients, besides computing them.

    Attributes:
        waiting: names of parameters whose `.grad` holds the sum over earlier micro-batches. Their gradients are added
            to it, as `loss.backward()` does.
        update: this is the last micro-batch: gradients go into updates. Otherwise they stay in `.grad`.
        max_grad_norm: before updates, clip by this global norm as `torch.nn.utils.clip_grad_norm_` does: no update then
            starts before the last gradient is complete. `inf` only computes the norm, and updates do not wait for it:
            gradients that are not finite then spoil their own parameters alone. None does neither.
        ranks: number of ranks that hold a shard of each parameter; before updates gradients are averaged over them.
        bucket_bytes: small weights are gathered together until they have so many bytes; the planner chooses it.
        units: kind of units that train or are frozen as a whole, see `freezing.units`: ranks then exchange the
            gradients of each by itself. None where nothing is ever frozen.
    """

    waiting: frozenset[str] = field(default_factory=frozenset)
    update: bool = True
    max_grad_norm: float | None = None
    ranks: int = 1
    bucket_bytes: int = field(default=BUCKET_BYTES, compare=False)
    units: UnitKind | None = None


class _Ending:
    """Appends to the tables what follows forward and backward."""

    def __init__(self, storages: list[Storage], values: list[Value], calls: list[Call]) -> None:
        self.storages = storages
        self.values = values
        self.calls = calls
        self._names = {v.name for v in values}

    def storage(self, nbytes: int, role: Any, name: str) -> int:
        self.storages.append(Storage(len(self.storages), nbytes, role, name))
        return self.storages[-1].storage

    def value(self, like: Value, storage: int, name: str, **changed: Any) -> int:
        base, n = name, 1
        while name in self._names:
            n += 1
            name = f"{base}_{n}"
        self._names.add(name)
        content = {**vars(like), "call": -1, "output": 0, "offset": 0, "source": "", **changed}
        content |= {"value": len(self.values), "storage": storage, "name": name}
        self.values.append(Value(**content))
        return self.values[-1].value

    def call(
        self,
        target: str,
        arguments: str,
        reads: tuple[int, ...],
        parameter: str,
        *,
        returns: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        signature: str = "",
    ) -> None:
        self.calls.append(
            Call(
                call=len(self.calls),
                target=target,
                arguments=arguments,
                reads=reads,
                returns=returns,
                returns_many=target in (NORM, SCATTER),
                mutates=mutates,
                is_view=False,
                is_random=False,
                replay_arguments="",
                phase="update",
                module=parameter,
                location="",
                signature=signature or call_signature(target, arguments, self.values),
            )
        )

    def waiting(self, parameter: str, like: Value) -> int:
        """Add a gradient that is in memory from the start."""
        storage = self.storage(_nbytes(like), "gradient", parameter)
        identifier = "grad_" + "".join(c if c.isalnum() else "_" for c in parameter)
        return self.value(like, storage, identifier, source=f"gradient:{parameter}")

    def add(self, parameter: str, waiting: int, gradient: int) -> None:
        """Add a gradient in place to the waiting one, once it is complete, as in eager's accumulation."""
        arguments = _arguments([waiting, gradient])
        storage_of_value = self.values[waiting].storage
        # What an in-place operator returns is its first argument under a new name, which nothing needs.
        self.call(ADD, arguments, (waiting, gradient), parameter, mutates=(storage_of_value,))

    def scatter(self, gradients: Mapping[str, int], shards: Sequence[Value], ranks: int) -> dict[str, int]:
        """Average gradients over all ranks together, and keep this rank's shard of each."""
        made: list[Value] = []
        for (parameter, gradient), shard in zip(gradients.items(), shards, strict=True):
            like = replace(self.values[gradient], shape=shard.shape, stride=shard.stride)
            storage = self.storage(_nbytes(like), "temporary", f"gradient shard {parameter}")
            made.append(self.values[self.value(like, storage, f"shard_{like.name}", call=len(self.calls))])
        made = [replace(v, output=i) for i, v in enumerate(made)]
        for value in made:
            self.values[value.value] = value
        self.call(
            SCATTER,
            scatter_arguments(gradients),
            tuple(gradients.values()),
            next(iter(gradients)),
            returns=tuple(v.value for v in made),
            signature=collective_signature(SCATTER, ranks, made),
        )
        return {name: v.value for name, v in zip(gradients, made)}

    def norm(self, parameter: str, gradient: int) -> int:
        """Compute the norm of one gradient, by the kernel that `clip_grad_norm_` uses."""
        like = self.values[gradient]
        storage = self.storage(_itemsize(like), "temporary", f"norm {parameter}")
        value = self.value(like, storage, f"norm_{like.name}", shape=(), stride=(), call=len(self.calls))
        arguments = json.dumps({"args": [[{"value": gradient}], 2.0], "kwargs": {}}, separators=(",", ":"))
        self.call(NORM, arguments, (gradient,), parameter, returns=(value,))
        return value

    def clip(self, norms: list[int], max_norm: float) -> int:
        """Compute the factor for all gradients."""
        like = self.values[norms[0]]
        dtype = like.dtype if len({self.values[n].dtype for n in norms}) == 1 else "float32"
        storage = self.storage(_itemsize(like), "temporary", "clip scale")
        value = self.value(like, storage, "scale", dtype=dtype, call=len(self.calls))
        # The program keeps the norm for its user, and that of the iteration before until this one has ended.
        self.storage(2 * _itemsize(self.values[value]), "outside", "global norms of the gradients")
        signature = f"{CLIP}|{len(norms)}|{dtype}"
        self.call(CLIP, clip_arguments(norms, max_norm), tuple(norms), "", returns=(value,), signature=signature)
        return value

    def update_all(
        self, gradients: dict[str, int], parameters: list[Value], states: list[int], known: _Known, scale: int
    ) -> None:
        """Update all parameters in one call."""
        rules = [known.rules[name] for name in gradients]
        forms = [f"{rule.settings}|{v.dtype}{list(v.shape)}{list(v.stride)}" for rule, v in zip(rules, parameters)]
        digest = hashlib.sha256("|".join(forms).encode()).hexdigest()[:16]
        clipped = "|clipped" * (scale >= 0)
        settings = json.dumps(sorted({rule.settings for rule in rules}))
        self.call(
            UPDATE_ALL,
            joint_arguments(gradients, rules[0].optimizer, settings, scale),
            (*gradients.values(), *(v.value for v in parameters), *([scale] if scale >= 0 else [])),
            "",
            mutates=tuple(sorted({*(v.storage for v in parameters), *states})),
            signature=f"{UPDATE_ALL}|{rules[0].optimizer}{known.code}|{len(parameters)} parameters|{digest}{clipped}",
        )

    def scale(self, parameter: str, waiting: int, scale: int) -> None:
        """Clip a waiting gradient that no update takes."""
        storage_of_value = self.values[waiting].storage
        self.call(SCALE, _arguments([waiting, scale]), (waiting, scale), parameter, mutates=(storage_of_value,))

    def update(self, name: str, gradient: int, parameter: Value, states: list[int], known: _Known, scale: int) -> None:
        """Update one parameter."""
        shape = "x".join(map(str, parameter.shape))
        clipped, rule = scale >= 0, known.rules[name]
        self.call(
            UPDATE,
            update_arguments(name, gradient, rule, scale),
            (gradient, parameter.value, *([scale] if clipped else [])),
            name,
            mutates=tuple(sorted([parameter.storage, *states])),
            signature=f"{UPDATE}|{rule.optimizer}{known.code}|{rule.settings}|{parameter.dtype}[{shape}]"
            + "|clipped" * clipped,
        )


def _arguments(reads: list[int]) -> str:
    return json.dumps({"args": [{"value": v} for v in reads], "kwargs": {}}, separators=(",", ":"))


def _itemsize(value: Value) -> int:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype.itemsize


def _nbytes(value: Value) -> int:
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride)) if all(value.shape) else 0
    return span * _itemsize(value)


@dataclass(frozen=True)
class _Known:
    """Facts about the optimizer that the updates of an iteration depend on.

    Attributes:
        rules: name -> update rule of each parameter that it holds.
        states: name -> storages of its states; under "" those that belong to no parameter.
        joint: all parameters are updated in one step.
        code: see `KnownOptimizer.code`.
    """

    rules: dict[str, UpdateRule]
    states: dict[str, list[int]]
    joint: bool
    code: str

    def label(self) -> str:
        """Return the optimizer's classes and settings, for people."""
        kinds = sorted({f"{rule.optimizer.rpartition(':')[2]} {rule.settings}" for rule in self.rules.values()})
        return "; ".join(kinds) + " in one step for all parameters" * self.joint


def _known(
    optimizer: KnownOptimizer | None,
    parameters: Mapping[str, torch.Tensor],
    values: Mapping[str, Value],
    trained: frozenset[str],
    ending: _Ending,
) -> _Known:
    """Learn what the optimizer keeps for its parameters, and give each of its states a storage.

    States of parameters that have no gradient here count too: other steps of the model train these, or have done so.
    """
    if optimizer is None:
        return _Known({}, {}, False, "")
    check_optimizer(optimizer.optimizer)
    rules = optimizer.rules(parameters)
    held = [name for name in values if name in rules]
    counted = [name for name in held if name in trained] + [
        name for name in held if name not in trained and _has_states(optimizer, parameters[name])
    ]
    if not counted:
        return _Known(rules, {}, False, "")
    forms = {n: StateForm(values[n].shape, values[n].stride, getattr(torch, values[n].dtype)) for n in counted}
    device = next(iter(parameters.values())).device
    kept = optimizer.kept({name: parameters[name] for name in counted}, forms, device)
    states = {
        name: [ending.storage(s.nbytes, "state", state_name(name, s.key, s.path)) for s in kept.of[name]]
        for name in counted
    }
    states[""] = [ending.storage(s.nbytes, "state", state_name("", s.key, s.path)) for s in kept.shared]
    return _Known(rules, states, bool(optimizer.habits.joint), optimizer.code())


def _has_states(optimizer: KnownOptimizer, parameter: torch.Tensor) -> bool:
    """Say whether the optimizer has states of a parameter that has no gradient in this step, or may come to."""
    return parameter.requires_grad or optimizer.has_states_of(parameter)


def append_updates(
    storages: list[Storage],
    values: list[Value],
    calls: list[Call],
    gradients: list[Gradient],
    optimizer: KnownOptimizer | None,
    parameters: Mapping[str, torch.Tensor],
    micro_batch: MicroBatch,
    whole: Mapping[str, Value] | None = None,
    units: Sequence[Unit] = (),
    outside: Collection[str] = (),
) -> str:
    """Append what happens to gradients, and the storages of optimizer states; return a label for people.

    `whole` has the forms of parameters before they were sharded, which their gradients have until they are scattered.
    Ranks exchange the gradients of each of the `units` by itself. Parameters named `outside` are no part of the model.

    A parameter with a gradient that the optimizer does not hold keeps its gradient, as with `optimizer=None`.

    Raises:
        TraceError: the optimizer cannot be stepped by a plan.
    """
    alone = not micro_batch.waiting and micro_batch.max_grad_norm is None and (micro_batch.update or optimizer is None)
    check_gradient_hooks(parameters, alone=alone)
    ending = _Ending(storages, values, calls)
    by_source = {v.source.removeprefix("parameter:"): v for v in values if v.source.startswith("parameter:")}
    fresh = {g.parameter: g.gradient_value for g in gradients if g.gradient_value >= 0}
    updating = micro_batch.update and optimizer is not None

    # In the order of the model's parameters: the norm of all norms is a sum, whose rounding depends on it.
    names = [name for name in by_source if name in fresh or name in micro_batch.waiting]
    known = _known(optimizer, parameters, by_source, frozenset(names), ending)
    if micro_batch.ranks > 1:
        _check_ranks(parameters, known.rules if updating else None, names, outside)
    whole = whole or by_source
    waiting = {name: ending.waiting(name, whole[name]) for name in names if name in micro_batch.waiting}
    for name, gradient in fresh.items():
        if name in waiting:
            ending.add(name, waiting[name], gradient)
    final = {name: waiting.get(name, fresh.get(name, -1)) for name in names}
    if updating and micro_batch.ranks > 1:
        together = {name: gradient for name, gradient in final.items() if 0 not in by_source[name].shape}
        completed = {name: values[fresh.get(name, gradient)].call for name, gradient in together.items()}
        for bucket in gradient_buckets(together, completed, values, whole, micro_batch.bucket_bytes, bits_of(units)):
            final |= ending.scatter(
                {name: together[name] for name in bucket}, [by_source[name] for name in bucket], micro_batch.ranks
            )
    scale = -1
    if updating and micro_batch.max_grad_norm is not None and final:
        norms = [ending.norm(name, gradient) for name, gradient in final.items()]
        factor = ending.clip(norms, micro_batch.max_grad_norm)
        scale = factor if math.isfinite(micro_batch.max_grad_norm) else -1
    updated = {name: gradient for name, gradient in final.items() if updating and name in known.rules}
    for name, gradient in final.items():
        if name in updated and not known.joint:
            ending.update(name, gradient, by_source[name], known.states[name], known, scale)
        elif updating and name not in updated and scale >= 0 and name in waiting:
            ending.scale(name, gradient, scale)
    if updated and known.joint:
        states = [s for kept in known.states.values() for s in kept]
        ending.update_all(updated, [by_source[name] for name in updated], states, known, scale)
    return known.label()


def _check_ranks(
    parameters: Mapping[str, torch.Tensor],
    rules: Mapping[str, UpdateRule] | None,
    names: list[str],
    outside: Collection[str],
) -> None:
    """Raise `TraceError` for what ranks with shards of parameters cannot do with gradients."""
    for name in names:
        if name in outside:
            raise TraceError(
                f"Parameter '{name}' of shape {tuple(parameters[name].shape)} gets a gradient and is no part of the "
                "model, and ranks share out and average what belongs to the model alone: make its module a part of "
                "the model, call requires_grad_(False) on it, or train without group."
            )
        if getattr(parameters[name], "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"Parameter '{name}' has a hook of register_post_accumulate_grad_hook, and no rank has its whole mean "
                "gradient: use register_hook, which sees the gradient of this rank's batch, or train without group."
            )
        if rules is not None and name not in rules:
            raise TraceError(
                f"Parameter '{name}' gets a gradient, but the optimizer does not hold it, and no rank has a place for "
                "the whole gradient: give it to the optimizer, or call requires_grad_(False) on it."
            )
