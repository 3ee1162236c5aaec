"""Tables that `options` and `solve` write: schedules of blocks, and the plan of the whole iteration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stowage.stages.ir.actions import PlanAction
from stowage.stages.ir.amounts import size_text, time_text
from stowage.stages.ir.machine import Placement, TierState
from stowage.stages.ir.trace import StorageRole


@dataclass(frozen=True)
class Option:
    """One schedule of one distinct block (thesis 2.5.1).

    Attributes:
        block_hash: hash of the block.
        option: position among the block's options.
        forward, backward: `BlockSchedule` parts, encoded: node k is k, freeing allocation i is −1 − i.
        formulation, status, gap: how the schedule was found, as in `SolveReport`.
        forward_time_s, backward_time_s, save_bytes, forward_peak_bytes, backward_peak_bytes, recomputed_bytes: as in
            `simulate.BlockCost`; `simulate.last_run` fills them and the following.
        last_run_time_s, last_run_save_bytes, last_run_forward_peak_bytes, last_run_backward_peak_bytes: both parts'
            time, and the same bytes, of a last run, when nobody needs the block's output any more.
    """

    block_hash: str
    option: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    formulation: str
    status: str
    gap: float
    forward_time_s: float = 0.0
    backward_time_s: float = 0.0
    save_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    recomputed_bytes: int = 0
    last_run_time_s: float = 0.0
    last_run_save_bytes: int = 0
    last_run_forward_peak_bytes: int = 0
    last_run_backward_peak_bytes: int = 0


@dataclass(frozen=True)
class PlanRow:
    """One action of the iteration.

    Attributes:
        row: position.
        action: what the row does, see `PlanAction`.
        node: compute node, or -1.
        storage: storage, or -1; the parameter for an `update`.
        block: block of the node or storage, -1 outside the chain.
        step: the step it belongs to, for people: `F3 option 2`, `F3 fast`, `B3`.
        recompute: the node has run before in this iteration.
        start_s, end_s: predicted, from the start of the iteration; of the copy for `offload` and `reload`.
        resident_bytes: predicted device bytes after the row.
        peak_bytes: predicted highest device bytes during the row.
    """

    row: int
    action: PlanAction
    node: int
    storage: int
    block: int
    step: str
    recompute: bool
    start_s: float
    end_s: float
    resident_bytes: int
    peak_bytes: int


EACH_WHOLE = " or "
"""Stands in `PlanSummary.bound_variant` between rewrites whose mixtures are not all bounded."""

Start = Literal["device", "offloaded", "reloading", "offloading", "updating"]


@dataclass(frozen=True)
class Slot:
    """The place in the lower tier of a storage that the plan transfers.

    Attributes:
        storage: the storage, by its position.
        name: its parameter's name, `parameter::state`, `gradient_slot` of a gradient that waits in `.grad`, or the
            identifier that generated code gives an activation.
        nbytes: bytes of the storage.
        role: parameter, state, temporary, or gradient (also one made in the iteration that waits in the lower tier).
        start: where a parameter, state or waiting gradient is between iterations: on the device, offloaded, or on its
            way to or from the lower tier.
        copied: between iterations the copy in the lower tier is up to date.
        placement: whether the slot is in the host or on the disk.
    """

    storage: int
    name: str
    nbytes: int
    role: StorageRole
    start: Start
    copied: bool
    placement: Placement = "host"


def tier_state(slots: Iterable[Slot]) -> TierState:
    """Return the places of persistent storages between iterations."""
    all_slots = list(slots)
    kept = [s for s in all_slots if s.role != "temporary"]

    def at(start: Start) -> frozenset[int]:
        return frozenset(s.storage for s in kept if s.start == start)

    return TierState(
        at("offloaded") | at("updating"),  # what the CPU updates is not on the device
        at("reloading"),
        at("offloading"),
        frozenset(s.storage for s in kept if s.copied),
        at("updating"),
        frozenset(s.storage for s in all_slots if s.placement == "disk"),
    )


@dataclass(frozen=True)
class PlanSummary:
    """The facts that a plan states about itself; `summary.json` beside the plan.

    Attributes:
        plan_hash: hash of rows and configuration; names checkpoints and `step.py`.
        configuration_hash: hash of the training configuration that the plan belongs to.
        method: formulation at the top level (`rockmate`, `keep_all`, …).
        device: name of the device that the costs are from.
        device_budget_bytes: the budget that was asked for, without `reserve_bytes`.
        device_peak_bytes: predicted highest device bytes of the iteration, everything included.
        baseline_bytes: parameters, optimizer states, buffers, inputs, constants and shared values.
        step_time_s: predicted.
        lower_bound_s: time of every operation once, without the updates that the CPU may take over.
        bound_s: a time that no schedule within the budget beats, of all rewrites and mixtures of them; 0 where only
            `lower_bound_s` is known.
        bound_kind: `cuts` where the cut formulation proved it, `mixed cuts` where it did for all mixtures of rewrites,
            `cuts under masks` for the mean time of a step that freezes, `cuts with transfers` where plans may offload,
            and its program has the links; `once` where that is the time of every operation once, without the updates
            that the CPU may take over.
        bound_cuts: names of the nodes at which the step was cut for it.
        bound_variant: the rewrite whose bound is the least, which is the one that counts; or those that were mixed,
            with commas; or, with `EACH_WHOLE` between them, those of which each is bounded by itself, and only that
            mixture of them that was planned and is the fastest.
        recomputed_bytes: bytes of distinct activations made more than once.
        activation_bytes: bytes of all activations that backward reads.
        keep_all_peak_bytes, keep_all_time_s: the same iteration without recomputation, in the same simulator.
        smallest_feasible_bytes: the smallest budget for which a plan was found.
        estimated_nodes: nodes whose cost is an estimate.
        device_fingerprint: fingerprint of the device that the costs are from.
        variant: the rewrite of the trace that it plans, see `VariantName`.
        exact: whether every number is that of plain PyTorch, bit for bit; no plan that is not is made unasked.
        lossy: what is kept for backward in fewer bits: kind, layers and class of tensors, as in
            `int8: h.[0-3].mlp.c_fc addmm`.
        lossy_effects: for each of them what it does to the gradient, in words.
        gradient_error: most that the gradient is predicted to change by, see `Lossy`; 0 for exact plans.
        lower_tier_bytes: most bytes in the lower tier at any time of the iteration.
        disk_bytes: the part of them that is on a disk.
        offload_bytes, reload_bytes: offloaded and reloaded in one iteration.
        wait_s: predicted time that computing waits for copies.
        fractional_time_s: O-ILP's time while tensors are fractions; 0 for plans that do not offload. The loss of
            rounding is `step_time_s` over this.
        rates_bound_s: least time that computing and the rates of the tiers allow within the budget; 0 likewise.
        reserve_bytes: part of the budget that is left to the device's allocator.
        budget_found: how the budget was found where it was not given in bytes: what was free and which reserve was left
            to others, or what was searched for.
        solver: what decided the plan: O-ILP with its solver's name and version for a plan that offloads; the rule that
            put blocks in order (`rk_rotor`, a fixed policy) with the formulations that found their schedules; or a rule
            alone.
        status: `optimal` or `feasible` as that solver says of its problem, the worst of several solves; `heuristic`
            where a rule decided. A plan that reaches a lower bound is `optimal`, whatever decided it: one within a
            thousandth of `bound_s` counts as that, and with it no other.
        gap: distance of the plan to `bound_s`, where there is one; else the distance to the optimum that the solver
            proved, or for a rule the distance to the lower bound.
        time_limit_s, seed: settings of one solve; 0 where no solver decided.
        units: number of units that a step may freeze; 0 where nothing is ever frozen. Where something is,
            `device_peak_bytes` is that of the worst choice of what trains, and `step_time_s` that of the mean choice.
        active_units: how many of them may train in a step.
        worst_units: the units that need most memory when they train together.
        worst_bound_bytes: bytes that no choice of units exceeds: the peak, unless a solver ran out of time.
        all_active_bytes, all_active_time_s: peak and time of a step in which every unit trains.
    """

    plan_hash: str
    configuration_hash: str
    method: str
    device: str
    device_budget_bytes: int
    device_peak_bytes: int
    baseline_bytes: int
    step_time_s: float
    lower_bound_s: float
    recomputed_bytes: int
    activation_bytes: int
    keep_all_peak_bytes: int
    keep_all_time_s: float
    smallest_feasible_bytes: int
    solver: str
    status: str
    gap: float
    time_limit_s: float
    seed: int
    estimated_nodes: int
    device_fingerprint: str = ""
    variant: str = "plain"
    exact: bool = True
    lower_tier_bytes: int = 0
    offload_bytes: int = 0
    reload_bytes: int = 0
    wait_s: float = 0.0
    fractional_time_s: float = 0.0
    rates_bound_s: float = 0.0
    disk_bytes: int = 0
    reserve_bytes: int = 0
    budget_found: str = ""
    units: int = 0
    active_units: int = 0
    worst_units: tuple[str, ...] = ()
    worst_bound_bytes: int = 0
    all_active_bytes: int = 0
    all_active_time_s: float = 0.0
    lossy: tuple[str, ...] = ()
    lossy_effects: tuple[str, ...] = ()
    gradient_error: float = 0.0
    bound_s: float = 0.0
    bound_kind: str = ""
    bound_cuts: tuple[str, ...] = ()
    bound_variant: str = ""

    @property
    def least_s(self) -> float:
        """Return the largest lower bound on the step's time that is known."""
        return max(self.lower_bound_s, self.bound_s)

    @property
    def kept_in_codes(self) -> list[tuple[str, str]]:
        """Return what is kept in fewer bits, each with its effect; "" where none is stated for all of them."""
        stated = len(self.lossy_effects) == len(self.lossy)
        return list(zip(self.lossy, self.lossy_effects if stated else [""] * len(self.lossy), strict=True))

    def __repr__(self) -> str:
        moved = ""
        if self.lower_tier_bytes:
            moved = (
                f"\n offloaded {size_text(self.lower_tier_bytes)}; each step moves "
                f"{size_text(self.offload_bytes)} down and {size_text(self.reload_bytes)} up"
            )
        reserve = f" beside a reserve of {size_text(self.reserve_bytes)}" if self.reserve_bytes else ""
        reserve += f" (the budget is {self.budget_found})" if self.budget_found else ""
        if self.lossy:
            kept = ", ".join(self.lossy)
            moved += f"\n keeps in fewer bits {kept}; the gradient changes by {self.gradient_error:.2%} at most"
        proof = ""
        if self.bound_s and self.step_time_s > 0:
            proof = f", at most {1 - self.bound_s / self.step_time_s:.2%} of it more than any schedule needs"
        estimated = f", {self.estimated_nodes} of its costs estimated" if self.estimated_nodes else ""
        return (
            f"<plan {self.plan_hash}: {self.method} ({self.variant}) on {self.device or 'an unknown device'}\n"
            f" peak {size_text(self.device_peak_bytes)} of {size_text(self.device_budget_bytes)}{reserve}; keeping "
            f"everything {size_text(self.keep_all_peak_bytes)}; smallest budget found "
            f"{size_text(self.smallest_feasible_bytes)}\n"
            f" {time_text(self.step_time_s)} a step, {time_text(self.keep_all_time_s)} keeping everything{estimated}"
            f"{proof}\n"
            f" computes {size_text(self.recomputed_bytes)} of {size_text(self.activation_bytes)} of activations again"
            f"{moved}{self._frozen()}>"
        )

    def _frozen(self) -> str:
        if not self.units:
            return ""
        return (
            f"\n at most {self.active_units} of {self.units} units train in a step: peak and time are of the worst and "
            f"of the mean choice; with all {size_text(self.all_active_bytes)}, {time_text(self.all_active_time_s)}"
        )


@dataclass(frozen=True)
class Manifest:
    """The identity of `step.py`; generated code is run only if its hash matches.

    The hash finds accidents, not attacks: one who can write `step.py` can write its hash too (see `runtime.whitelist`).

    Attributes:
        plan_hash, configuration_hash: those of the plan.
        source_hash: SHA-256 of the text of `step.py`.
    """

    plan_hash: str
    configuration_hash: str
    source_hash: str


def plan_hash(rows: Iterable[PlanRow], configuration: str, budget: int, frozen: str = "") -> str:
    """Compute the name of a plan from its actions, configuration and budget, and the text of what it may freeze."""
    content = ",".join(f"{r.action[0]}{r.node}.{r.storage}" for r in rows)
    if frozen:
        content += f";{frozen}"
    return hashlib.sha256(f"{configuration};{budget};{content}".encode()).hexdigest()[:16]
