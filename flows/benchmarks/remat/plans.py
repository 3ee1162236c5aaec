"""Plans one model for many budgets and methods, from one trace and the same stores."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from stowage.flows.benchmarks.remat.models import RematCase
from stowage.flows.benchmarks.remat.names import EAGER
from stowage.flows.benchmarks.remat.peers import make_peer
from stowage.flows.planning.step import QUICK, Costed, Effort, Planned, Planning, StepToPlan, cost_step, plan_costed
from stowage.stages.ir.activations import device_budget, fixed_bytes
from stowage.stages.ir.errors import MIB, Infeasible, StowageError

NOT_MUCH = 1
"""A budget in bytes that nothing meets: the error says which would be met."""

PLAIN_SHARE, PLAIN_ITERATIONS = 0.6, 3
"""Least share of profiling time, and least number of iterations, in which plain PyTorch runs among the calls.

One iteration differs from the next by up to 20% on a shared machine, so that a dozen of them say little.
"""


class RematPlanner:
    """Answers which plans there are; processes that run them find them in `stores`.

    Args:
        case: the model; its parameters stay as they are.
        stores: folder of the stores, see `cache_dir` of `fit`.
        quick: see `fit`.
    """

    def __init__(self, case: RematCase, stores: Path, *, quick: bool) -> None:
        plain = _PlainAmongCalls(case)
        self._how = Planning(stores=stores, effort=QUICK if quick else Effort(), profiled=plain.look)
        step = StepToPlan(model=case.model, batch=case.batch, loss=case.loss)
        self._costed: Costed = cost_step(step, self._how)
        self._plain_s = plain.time_s()
        self._fixed = fixed_bytes(self._costed.variants[0].trace)
        self._whole = self._plan("auto", 2 * self._costed.eager_peak_bytes).summary

    def _plan(self, method: str, budget: int) -> Planned:
        return plan_costed(self._costed, budget, replace(self._how, method=method))

    def about(self) -> dict[str, Any]:
        """Return peak, time and call count of keep-all, its bytes that are no activations, and plain PyTorch's time.

        Plain PyTorch's time is the one measured while the calls were profiled.
        """
        return {
            "fixed_bytes": self._fixed,
            "keep_all_peak_bytes": self._whole.keep_all_peak_bytes,
            "keep_all_time_s": self._whole.keep_all_time_s,
            "plain_time_s": self._plain_s,
            "calls": len(self._costed.variants[0].trace.calls),
        }

    def reply(self, request: Any) -> dict[str, Any]:
        """Plan with a method, within a share of keep-all's activation budget or within bytes, and say what came of it.

        Without both, the budget is the method's smallest feasible one. The answer is its budget, prediction, hash and
        planning
        time, or the reason why there is no plan.
        """
        method, share, budget = request
        try:
            return self._reply(method, share, budget)
        except Infeasible as infeasible:
            least = infeasible.smallest_feasible_bytes / MIB
            return {"budget": infeasible.budget_bytes, "why": f"the smallest feasible budget is {least:,.1f} MiB"}
        except StowageError as error:
            return {"budget": -1, "why": str(error)}
        except Exception as error:  # a failure of a planner is a line of the table
            return {"budget": -1, "why": f"{type(error).__name__}: {error}"}

    def _reply(self, method: str, share: float | None, budget: int | None) -> dict[str, Any]:
        started = time.perf_counter()
        if budget is None:
            budget = self._smallest(method) if share is None else self._share(share)
        s = self._plan(method, budget).summary
        return {
            "budget": budget,
            "plan_s": time.perf_counter() - started,
            "predicted_peak_bytes": s.device_peak_bytes,
            "predicted_time_s": s.step_time_s,
            "predicted_overhead": s.step_time_s / s.keep_all_time_s - 1,
            "plain_time_s": self._plain_s,
            "found_by": s.method,
            "plan_hash": s.plan_hash,
        }

    def _share(self, share: float) -> int:
        return device_budget(self._fixed, self._whole.keep_all_peak_bytes, share)

    def _smallest(self, method: str) -> int:
        try:
            self._plan(method, NOT_MUCH)
        except Infeasible as infeasible:
            return infeasible.smallest_feasible_bytes
        return NOT_MUCH


class _PlainAmongCalls:
    """Times plain PyTorch in the moments in which the calls are profiled."""

    def __init__(self, case: RematCase) -> None:
        self._case = case
        self._plain = make_peer(EAGER, case)
        self._times: list[float] = []
        self._run()  # the first iteration is not timed
        self._began = time.perf_counter()

    def look(self, done: int, total: int) -> None:
        """Run an iteration of plain PyTorch before a call is profiled, if it is time for one."""
        del done, total
        if sum(self._times) < PLAIN_SHARE * (time.perf_counter() - self._began):
            self._timed()

    def time_s(self) -> float:
        """Return the mean time of an iteration: what interrupts the calls is in their times too."""
        while len(self._times) < PLAIN_ITERATIONS:
            self._timed()
        return statistics.fmean(self._times)

    def _timed(self) -> None:
        began = time.perf_counter()
        self._run()
        self._times.append(time.perf_counter() - began)

    def _run(self) -> None:
        self._plain(self._case.batch)
        self._case.model.zero_grad()
