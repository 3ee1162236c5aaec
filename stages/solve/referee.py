"""Judges plans and hides their transfers: no other place of `solve` does either."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import EVERYTHING_ON_DEVICE, TierState
from stowage.stages.ir.step import Step
from stowage.stages.simulate.lower_tier import NO_TIER, ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from stowage.stages.solve.collectives.overlap import overlap
from stowage.stages.solve.known import Known
from stowage.stages.solve.offload.cpu_updates import UpdatesOnCpu
from stowage.stages.solve.offload.hiding.shift import shift
from stowage.stages.solve.offload.placements import places_on_disk
from stowage.stages.solve.offload.tier import LowerTier
from stowage.stages.solve.program.program import StepProgram
from stowage.stages.solve.proposal import JudgedPlan, Proposal

SAME_SUM = 1e-9
"""Relative difference of sums that add up the same times in another order."""


class Referee:
    """Judges plans of one program within one budget."""

    def __init__(self, program: StepProgram, budget_bytes: int, known: Known | None = None) -> None:
        self._program = program
        self._budget_bytes = budget_bytes
        self._known = known if known is not None else Known()
        self._cpu_update_s: dict[LowerTier, dict[int, float]] = {}
        self._collectives = any(n.collective for n in program.nodes)

    def fits(self, plan: JudgedPlan) -> bool:
        """Return whether a plan keeps within the budget."""
        return plan.peak_bytes <= self._budget_bytes

    def listen(self, proposals: Generator[Proposal, JudgedPlan | None, object]) -> Iterator[JudgedPlan]:
        """Judge proposals one by one, and send each verdict back to the maker.

        Raises:
            IllegalPlanError: a plan that offloads nothing is refused, which no source should propose.
        """
        verdict: JudgedPlan | None = None
        while True:
            try:
                proposal = proposals.send(verdict)
            except StopIteration:
                return
            try:
                verdict = self.judge(proposal)
            except IllegalPlanError:
                if proposal.tier is None:
                    raise
                verdict = None
                continue
            yield verdict

    def judge(self, proposal: Proposal) -> JudgedPlan:
        """Find a slot for everything that is offloaded, and judge the plan.

        Raises:
            IllegalPlanError: the plan is not legal.
        """
        tier, state, program = proposal.tier, proposal.state, self._program
        if tier is not None:
            wanted = proposal.wanted_on_disk
            on_disk = places_on_disk(tier, proposal.steps, state, program.nodes, program.nbytes, wanted)
            state = replace(state, on_disk=on_disk)
        if proposal.only_bound:  # the same for every budget
            outcome: Outcome = self._known.of(proposal, "outcome", lambda p: self.outcome(p.steps, state, tier))
        else:
            outcome = self.outcome(proposal.steps, state, tier)
        plan = JudgedPlan(**{**vars(proposal), "state": state}, outcome=outcome)
        return self.hide(plan) if proposal.hide_at_once and self.fits(plan) else plan

    def outcome(
        self,
        steps: Sequence[Step],
        state: TierState = EVERYTHING_ON_DEVICE,
        tier: LowerTier | None = None,
        staging_bytes: int | None = None,
    ) -> Outcome:
        """Replay a plan.

        Args:
            steps: the rows of the plan.
            state: where persistent storages are when an iteration starts.
            tier: the lower tier that it may use.
            staging_bytes: device memory that the tier needs for itself; by default for the tensors that leave.

        Raises:
            IllegalPlanError: the plan is not legal.
        """
        program = self._program
        if tier is not None and staging_bytes is None:
            staging_bytes = tier.staging_for(len(state.offloaded | {s.storage for s in steps if s.kind == "reload"}))
        return replay_plan(
            program.storages,
            program.nodes,
            steps,
            keep=program.kept,
            start=state,
            tier=NO_TIER if tier is None else self._replayed(tier, staging_bytes or 0),
        )

    def _replayed(self, tier: LowerTier, staging_bytes: int) -> ReplayedTier:
        disk = tier.disk.link if tier.disk is not None else None
        room = tier.host_room_bytes, tier.disk_room_bytes
        return ReplayedTier(tier.link, disk, staging_bytes, self._updates(tier), *room)

    def _updates(self, tier: LowerTier) -> dict[int, float]:
        if tier not in self._cpu_update_s:
            updates = UpdatesOnCpu(self._program, tier)
            self._cpu_update_s[tier] = {n.node: updates.seconds(n) for n in self._program.nodes if n.phase == "update"}
        return self._cpu_update_s[tier]

    def hide(self, plan: JudgedPlan) -> JudgedPlan:
        """Return the plan with its transfers hidden behind computing as well as the budget allows."""
        if plan.hidden or (plan.tier is None and not self._collectives):
            return plan

        def judge(steps: Sequence[Step]) -> Outcome | None:
            try:
                return self.outcome(steps, plan.state, plan.tier)
            except IllegalPlanError:
                return None

        program = self._program
        steps, outcome = plan.steps, plan.outcome
        touched = {n.node: frozenset({*n.reads, *n.mutates}) for n in program.nodes if n.phase == "update"}
        if plan.tier is not None:
            steps, outcome = shift(steps, outcome, program.nbytes, self._budget_bytes, judge, touched)
        if self._collectives:
            steps, outcome = overlap(steps, outcome, program.nodes, program.nbytes, self._budget_bytes, judge)
            if plan.tier is not None:  # what collectives no longer hide is late now
                steps, outcome = shift(steps, outcome, program.nbytes, self._budget_bytes, judge, touched)
        return replace(plan, steps=steps, outcome=outcome, hidden=True)

    def hide_all(self, plans: Sequence[JudgedPlan], fastest_s: float) -> Iterator[JudgedPlan]:
        """Hide the transfers of plans that fit, except those that one resource alone makes slower than another plan.

        Args:
            plans: the plans that were judged.
            fastest_s: the time of the fastest plan so far.
        """
        fitting = [(self._least_s(p), p) for p in plans if self.fits(p)]
        for at_least_s, plan in sorted(fitting, key=lambda pair: pair[0]):
            if at_least_s >= fastest_s * (1 + SAME_SUM):
                return
            hidden = self.hide(plan)
            fastest_s = min(fastest_s, hidden.time_s)
            yield hidden

    def _least_s(self, plan: JudgedPlan) -> float:
        """Return the longest time of one resource alone, a lower bound however well transfers are hidden.

        Resources are computing, transfers each way, and updates by the CPU.
        """
        found, tier = plan.outcome, plan.tier
        runs = [self._program.nodes[s.node] for s in plan.steps if s.kind == "compute"] if self._collectives else []
        together_s = sum(n.time_s for n in runs if n.collective)
        if tier is None:
            return max(found.time_s - together_s, together_s)
        update_s = self._updates(tier)
        cpu_s = sum(update_s[s.node] for s in plan.steps if s.kind == "update")
        down_s, up_s = (
            found.offload_bytes / tier.link.offload_bytes_per_s,
            found.reload_bytes / tier.link.reload_bytes_per_s,
        )
        return max(found.time_s - found.wait_s - together_s, together_s, cpu_s, down_s, up_s)
