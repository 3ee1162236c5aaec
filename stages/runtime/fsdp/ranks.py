"""Lets ranks tell each other what they have, what they plan, and whether they succeeded, before they shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stowage.stages.ir.errors import ParameterError, StowageError
from stowage.stages.runtime.sharding.agreement import difference, failure_text, raise_failure
from stowage.stages.runtime.sharding.memory import each_once
from stowage.stages.runtime.sharding.ranks import Ranks

PIECE = 1 << 20
"""Elements that are looked at together, so that comparing weights takes little memory."""


def begin_alike(describe: Callable[[], dict[str, str]], check: Callable[[], None], ranks: Ranks | None) -> None:
    """Return once all ranks have the same facts and nothing is wrong on any of them; all call this together.

    Args:
        describe: makes facts that must be equal on all ranks: a name for people -> lines of text.
        check: raises an error if something is wrong on this rank.
        ranks: all of them; None for this process alone.

    Raises:
        ParameterError: ranks have different facts; the sentence is the same on all.
        StowageError: something is wrong on another rank.
    """
    if ranks is None:
        describe()
        check()
        return
    facts: dict[str, str] = {}
    failure: Exception | None = None
    try:
        facts = describe()
        check()
    except Exception as error:  # the others must hear of it instead of waiting for this rank
        failure = error
    found = ranks.all((facts, failure_text(failure) if failure is not None else None), "what all ranks were given")
    if all(other for other, _ in found) and any(other != found[0][0] for other, _ in found):
        raise ParameterError(difference([other for other, _ in found]))
    if failure is not None:
        raise failure
    raise_failure([said for _, said in found])


def from_first(make: Callable[[], str], ranks: Ranks, what: str) -> str:
    """Return what `make` returns on the first rank; if it fails there, all ranks raise its sentence.

    `what` names it in errors.
    """
    failure: Exception | None = None

    def attempt() -> tuple[str, str]:
        nonlocal failure
        try:
            return make(), ""
        except Exception as error:  # the others must not wait for a plan that never comes
            failure = error
            return "", f"{type(error).__name__}: {error}"

    made, said = ranks.from_first(attempt, what)
    if failure is not None:
        raise failure
    if said:
        raise StowageError(f"Rank 0 could not plan: {said}")
    return made


def all_succeed(work: Callable[[], None], ranks: Ranks) -> None:
    """Do something that needs no other rank; raise on all ranks if it failed on one."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    found = ranks.all(said, "whether all ranks have sharded the model")
    if failure is not None:
        raise failure
    for rank, text in enumerate(found):
        if text is not None:
            raise StowageError(f"Rank {rank} could not shard the model, so no rank does: {text}")


@contextmanager
def same_weights(model: nn.Module, ranks: Ranks) -> Iterator[list[str]]:
    """Give all ranks the first rank's parameters and buffers, as DDP does; take it back if the block raises.

    Yields:
        The names of those that differed.
    """
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {name: tensor for name, tensor in named.items() if tensor.device.type != "meta"}
    own = {name: _digest_of(tensor) for name, tensor in named.items()}
    found = ranks.all(own, "the sums over the weights")
    different = [name for name in named if any(other[name] != found[0][name] for other in found)]
    replaced = [name for name in different if own[name] != found[0][name]]
    before = {name: each_once(named[name].detach()).clone() for name in replaced}
    for name in different:
        ranks.broadcast(named[name].detach(), f"'{name}' of rank 0")
    try:
        yield different
    except BaseException:
        with torch.no_grad():
            for name, content in before.items():
                each_once(named[name].detach()).copy_(content)
        raise


def _digest_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two sums over the bits of a tensor, the second weighted by position."""
    content = tensor.detach().contiguous().view(-1)
    if content.is_complex():
        content = torch.view_as_real(content).reshape(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[content.element_size()]
    plain = weighted = 0
    for start in range(0, content.numel(), PIECE):
        bits = content[start : start + PIECE].view(kind).to(torch.int64)
        places = torch.arange(start + 1, start + 1 + bits.numel(), device=bits.device)
        plain += int(bits.sum())
        weighted += int((bits * places).sum())
    return plain, weighted
