"""The plan that `shard` returns: what was chosen for each group of parameters, and what it will take."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from stowage.flows.api.sharding.choose import Chosen, Situation
from stowage.flows.api.sharding.precision import policy_content, policy_of, policy_text
from stowage.stages.ir.amounts import size_text, time_text
from stowage.stages.ir.parallel import GroupChoice, ParallelMachine, ParameterGroup

_OF_PRECISION = ("reduce_bytes", "casts_gradients", "largest_cast", "update_bytes")
"""What a policy of mixed precision says of a group."""


@dataclass(frozen=True)
class ShardPlan:
    """How a model is sharded over the ranks of a group; the same on all ranks.

    Attributes:
        machine: the machine, as its ranks measured it.
        groups: the groups of parameters, the model's own first.
        choices: the state of each group.
        device_budget_bytes: what each rank may use of its device.
        host_budget_bytes: what all ranks together may use of the host.
        predicted_time_s: predicted time of a step.
        predicted_peak_bytes: predicted peak of a rank's device memory, everything included.
        predicted_host_bytes: predicted bytes in the host, of all ranks together.
        prefetch: groups that are gathered ahead of their use.
        chosen_by: who made the choice: `exact`, Elixir's `greedy` search, a fixed policy, or `given`.
        moment: when the peak is.
        mixed_precision: the types in which all groups compute and reduce; None for the stored ones.
    """

    machine: ParallelMachine
    groups: tuple[ParameterGroup, ...]
    choices: tuple[GroupChoice, ...]
    device_budget_bytes: int
    host_budget_bytes: int
    predicted_time_s: float
    predicted_peak_bytes: int
    predicted_host_bytes: int
    prefetch: int
    chosen_by: str
    moment: str
    mixed_precision: MixedPrecisionPolicy | None = None

    @staticmethod
    def of(situation: Situation, chosen: Chosen, mixed_precision: MixedPrecisionPolicy | None = None) -> ShardPlan:
        """Return the plan that a choice makes."""
        return ShardPlan(
            machine=situation.machine,
            groups=situation.groups,
            choices=chosen.choices,
            device_budget_bytes=situation.device_budget_bytes,
            host_budget_bytes=situation.host_budget_bytes,
            predicted_time_s=chosen.time_s,
            predicted_peak_bytes=chosen.device_bytes,
            predicted_host_bytes=chosen.host_bytes,
            prefetch=situation.prefetch,
            chosen_by=chosen.name,
            moment=chosen.moment,
            mixed_precision=mixed_precision,
        )

    @property
    def whole(self) -> bool:
        """Say whether nothing is done: one rank, with all parameters on its device, in the type that is stored."""
        return self.machine.ranks == 1 and self.mixed_precision is None and not any(c.on_host for c in self.choices)

    @property
    def content_hash(self) -> str:
        """Return a hash of everything that ranks must agree on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the plan as text."""
        content = asdict(self)
        if self.mixed_precision is None:  # what it adds is left out, so that plans without it keep their hash
            del content["mixed_precision"]
            content["groups"] = [{k: v for k, v in g.items() if k not in _OF_PRECISION} for g in content["groups"]]
        else:
            content["mixed_precision"] = policy_content(self.mixed_precision)
        return json.dumps(content, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ShardPlan:
        """Read what `to_json` wrote."""
        content: dict[str, Any] = json.loads(text)
        content["machine"] = ParallelMachine(**content["machine"])
        content["groups"] = tuple(ParameterGroup(**_tuples(g)) for g in content["groups"])
        content["choices"] = tuple(GroupChoice(**c) for c in content["choices"])
        if "mixed_precision" in content:
            content["mixed_precision"] = policy_of(content["mixed_precision"])
        return ShardPlan(**content)

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *_table(self.groups, self.choices)])

    __repr__ = __str__

    def _summary(self) -> list[str]:
        ranks = self.machine.ranks
        elements = sum(g.elements for g in self.groups)
        trainable = sum(g.trainable for g in self.groups)
        what = (
            "not sharded: one rank, and everything fits on its device"
            if self.whole
            else f"over {ranks} rank{'s' * (ranks > 1)}"
        )
        precision = [policy_text(self.mixed_precision)] if self.mixed_precision is not None else []
        return [
            f"{elements:,} parameters ({trainable:,} train) in {len(self.groups)} groups, {what}",
            f"predicted: {time_text(self.predicted_time_s)} a step, peak {size_text(self.predicted_peak_bytes)} of "
            f"{size_text(self.device_budget_bytes)} on each device ({self.moment}), "
            f"{size_text(self.predicted_host_bytes)} of "
            f"{size_text(self.host_budget_bytes)} in the host; chosen by: {self.chosen_by}",
            *precision,
        ]


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}


def _table(groups: Sequence[ParameterGroup], choices: Sequence[GroupChoice]) -> list[str]:
    """Return a line for each run of neighbouring groups that are alike."""
    lines = []
    runs: list[list[tuple[ParameterGroup, GroupChoice]]] = []
    for group, choice in zip(groups, choices, strict=True):
        last = runs[-1][-1] if runs else None
        alike = last and last[0].elements == group.elements and _state(last[1]) == _state(choice)
        if alike:
            runs[-1].append((group, choice))
        else:
            runs.append([(group, choice)])
    for run in runs:
        (first, choice), (last_group, _) = run[0], run[-1]
        names = _name(first) if len(run) == 1 else f"{_name(first)} … {_name(last_group)} ({len(run)} groups)"
        lines.append(f"  {names}: {first.elements:,} parameters, {_state(choice)}")
    count = Counter(_state(c) for c in choices)
    lines.append("  " + ", ".join(f"{n} × {state}" for state, n in count.items()))
    return lines


def _name(group: ParameterGroup) -> str:
    return " + ".join(m or "the model's own" for m in group.modules)


def _state(choice: GroupChoice) -> str:
    where = "shards in the host, updated by the CPU" if choice.on_host else "shards on the device"
    return f"{where}, {'weights kept for backward' if choice.keep else 'weights gathered again for backward'}"
