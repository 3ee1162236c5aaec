"""Lists the policies that treat all groups alike: ZeRO-2 (everything is kept) and ZeRO-3, offloaded or not."""

from __future__ import annotations

from stowage.stages.formulations.sharding.problem import ShardingProblem
from stowage.stages.ir.parallel import GroupChoice


def fixed_policies(problem: ShardingProblem) -> dict[str, tuple[GroupChoice, ...]]:
    """Map the name of each policy to its choices."""
    everything = set(range(len(problem.groups)))
    return {
        "ZeRO-2": problem.choices(set(), everything),
        "ZeRO-3": problem.choices(set(), set()),
        "ZeRO-2 offloaded": problem.choices(everything, everything),
        "ZeRO-3 offloaded": problem.choices(everything, set()),
    }
