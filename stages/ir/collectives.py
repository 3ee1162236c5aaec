"""Defines the collectives of a sharded step as calls, and how a parameter is cut into shards.

    weight, … = stowage.gather([shard, …])    the whole weights, from the shards of all ranks
    shard, … = stowage.scatter([gradient, …]) this rank's shard of each gradient's mean over all ranks

A gather reads shards, which are persistent, and creates whole weights, so keeping a gathered weight is keeping a value,
resharding is freeing it, and gathering it again is computing it again. Ranks hold shards of equal size: as in FSDP2 the
rows of a parameter (its first dimension) are dealt out in equal parts, and the last ranks' parts are padded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stowage.stages.ir.trace import Call, Value

GATHER = "stowage.gather"
SCATTER = "stowage.scatter"
COLLECTIVES = frozenset({GATHER, SCATTER})


@dataclass(frozen=True)
class ShardForm:
    """How the memory of one dense tensor is dealt out to ranks.

    Attributes:
        ranks: number of ranks.
        rows: equal parts that are never cut: the first dimension where its rows lie one after the other, else elements.
        row: elements of one of them.
        shape, stride: of a shard, padding included.
    """

    ranks: int
    rows: int
    row: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], stride: Sequence[int], ranks: int) -> ShardForm | None:
        """Return the form of a tensor's shards; None if it has no elements or gaps between them."""
        elements = math.prod(shape)
        if not elements or not _dense(shape, stride):
            return None
        row = elements // shape[0] if shape else 1
        if shape and (stride[0] == row or shape[0] == 1):  # rows lie one after the other
            rows = -(-shape[0] // ranks)
            return ShardForm(ranks, shape[0], row, (rows, *shape[1:]), tuple(stride))
        return ShardForm(ranks, elements, 1, (-(-elements // ranks),), (1,))

    @property
    def shard_rows(self) -> int:
        """Return the rows of a shard, padding included."""
        return -(-self.rows // self.ranks)

    @property
    def shard_elements(self) -> int:
        """Return the elements of a shard, padding included."""
        return self.shard_rows * self.row

    @property
    def padded_elements(self) -> int:
        """Return the elements of all shards together."""
        return self.shard_elements * self.ranks

    @property
    def elements(self) -> int:
        """Return the elements of the tensor."""
        return self.rows * self.row

    def own_rows(self, rank: int) -> int:
        """Return how many rows of a rank's shard are not padding."""
        return min(max(self.rows - rank * self.shard_rows, 0), self.shard_rows)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether the elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for step, count in sorted((s, n) for n, s in zip(shape, stride) if n > 1):
        if step != expected:
            return False
        expected *= count
    return True


def scatter_arguments(gradients: Mapping[str, int]) -> str:
    """Return the `arguments` of a scatter: names of parameters, each with the value of its gradient."""
    content = {"args": [list(gradients), [{"value": v} for v in gradients.values()]], "kwargs": {}}
    return json.dumps(content, separators=(",", ":"))


def scattered(arguments: str) -> dict[str, int]:
    """Return the gradient's value for each parameter's name, from the arguments of a scatter."""
    names, gradients = json.loads(arguments)["args"]
    return {name: gradient["value"] for name, gradient in zip(names, gradients, strict=True)}


def collective_signature(target: str, ranks: int, shards: Sequence[Value]) -> str:
    """Return the signature of a collective: equal ones take the same time."""
    forms = ",".join(f"{v.dtype}[{math.prod(v.shape)}]" for v in shards)
    return f"{target}|{ranks} ranks|{forms}"


def collective_ranks(signature: str) -> int:
    """Return the ranks that take part in the collective of a signature."""
    return int(signature.split("|")[1].split()[0])


def ranks_of(calls: Iterable[Call]) -> int:
    """Return the ranks that a step is for; 1 where it exchanges nothing."""
    return next((collective_ranks(call.signature) for call in calls if call.target in COLLECTIVES), 1)
