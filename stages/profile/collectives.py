"""Computes the cost of collectives from the rates that this run's ranks have measured among each other."""

from __future__ import annotations

from stowage.stages.ir.collectives import GATHER, collective_ranks
from stowage.stages.ir.costs import Cost, DeviceDescription
from stowage.stages.ir.errors import PlanMismatchError
from stowage.stages.ir.trace import Call, TraceTables

SCALAR_BYTES = 24
"""Most that a CPU takes for the number that gradients are divided by: as a double, and in their type."""


def collective_cost(call: Call, trace: TraceTables, target: DeviceDescription) -> Cost:
    """Return what a gather or scatter costs.

    Raises:
        PlanMismatchError: the device's description has no rate of collectives among so many ranks.
    """
    ranks = collective_ranks(call.signature)
    if not target.collective_bytes_per_s or target.collective_ranks not in (0, ranks):
        raise PlanMismatchError(
            f"The step gathers weights among {ranks} ranks, and {target.name} has no rate for that: measure it "
            f"(`stowage device {target.type} --ranks {ranks}`); without a project, `fit(..., group=...)` measures it."
        )
    shards = call.reads if call.target == GATHER else call.returns
    nbytes = [trace.storages[trace.values[v].storage].nbytes for v in shards]
    moved = sum(nbytes) * (ranks - 1)
    made = {trace.values[v].storage for v in call.returns}
    return Cost(
        call.signature,
        target.fingerprint,
        target.collective_s + moved / target.collective_bytes_per_s,
        sum(trace.storages[s].nbytes for s in made),
        workspace_bytes(call.target, nbytes, ranks, target.type),
        1,
        "measured",
    )


def workspace_bytes(target: str, shard_bytes: list[int], ranks: int, device: str) -> int:
    """Return the bytes that a collective needs besides its argument and its result.

    A gather of several shards fills one buffer, and copies its results out of it at its end. A scatter divides the
    gradient into a buffer, which it needs until its end; of several, each by itself before it is copied there. A
    CPU divides by a tensor that it makes of the number.
    """
    whole = sum(shard_bytes) * ranks
    if target == GATHER:
        together = len(shard_bytes) > 1
        # Gloo copies the shards into the buffer at once; elsewhere they are read until the end.
        return (whole + (0 if device == "cpu" else sum(shard_bytes))) * together
    scalar = SCALAR_BYTES if device == "cpu" else 0
    return whole + scalar + (max(shard_bytes) * ranks if len(shard_bytes) > 1 else 0)
