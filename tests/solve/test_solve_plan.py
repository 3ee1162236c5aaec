"""Plans of random steps: legal, within budget, never worse than fixed policies, and honest about what is infeasible."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stowage.stages.formulations.chain.policies import fixed_policies
from stowage.stages.ir.errors import Infeasible, ParameterError, TableError
from stowage.stages.ir.trace import TraceTables
from stowage.stages.simulate.plan import baseline_bytes
from stowage.stages.solve.program.chain import Chain, Execution
from stowage.stages.solve.program.of_trace import eager_peak_bytes, program_of
from stowage.stages.solve.request import PlanRequest
from stowage.stages.solve.select import solve_plan
from tests.matrix import examples, some
from tests.solve.judged import replayed
from tests.solve.prepared import PLENTY, Prepared, prepare_trace, prepared_zoo
from tests.solve.synthetic_steps import training_steps

QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=examples(40), **QUICK)
@given(training_steps(), st.floats(0, 1))
def test_plans_of_random_steps_are_legal_and_within_budget(trace: TraceTables, share: float) -> None:
    prepared = prepare_trace(trace)
    rich = prepared.solve()
    prepared.judge(rich, PLENTY)
    assert rich.summary.step_time_s == pytest.approx(rich.summary.lower_bound_s), (
        "with memory to spare nothing runs twice"
    )
    least = rich.summary.smallest_feasible_bytes
    assert baseline_bytes(trace.storages) < least <= rich.summary.device_peak_bytes
    assert least <= eager_peak_bytes(trace, prepared.nodes)
    with pytest.raises(Infeasible) as caught:
        prepared.solve(1)
    named = caught.value.smallest_feasible_bytes
    budget = least + int(share * (rich.summary.device_peak_bytes - least))
    for method in ("auto", "rockmate"):
        solved = prepared.solve(budget, method)
        prepared.judge(solved, budget)
        assert named <= solved.summary.smallest_feasible_bytes <= min(least, solved.summary.device_peak_bytes)


@settings(max_examples=examples(40), **QUICK)
@given(training_steps())
def test_infeasible_names_a_budget_that_works_and_below_which_nothing_does(trace: TraceTables) -> None:
    prepared = prepare_trace(trace)
    with pytest.raises(Infeasible) as caught:
        prepared.solve(1)
    error = caught.value
    assert error.budget_bytes == 1
    assert error.binding_step
    assert error.occupants == sorted(error.occupants, key=lambda o: (-o.nbytes, o.name))
    assert sum(o.nbytes for o in error.occupants) <= error.smallest_feasible_bytes
    solved = prepared.solve(error.smallest_feasible_bytes)
    prepared.judge(solved, error.smallest_feasible_bytes)
    with pytest.raises(Infeasible) as again:
        prepared.solve(error.smallest_feasible_bytes - 1)
    assert again.value.smallest_feasible_bytes == error.smallest_feasible_bytes


def policies_of(prepared: Prepared) -> dict[str, tuple[int, float]]:
    """Peak and time of each fixed policy in the referee, unpolished."""
    program = program_of(prepared.trace, prepared.nodes)
    chain = Chain(prepared.blocks, prepared.nodes, prepared.options)
    found: dict[str, tuple[int, float]] = {}
    runs = {name: chain.executions(steps) for name, steps in fixed_policies(chain.chain_blocks).items()}
    runs["keep_all"] = [Execution(n.node, "keep") for n in prepared.nodes]
    for name, executions in runs.items():
        outcome = replayed(program, program.without_dead(executions))
        found[name] = outcome.peak_bytes, outcome.time_s
    return found


@pytest.mark.parametrize("method", ["auto", "rockmate"])
@pytest.mark.parametrize("name", some(["gpt2", "llama", "bert", "resnet"], keep=["llama", "resnet"]))
def test_never_worse_than_fixed_policies(name: str, method: str) -> None:
    prepared = prepared_zoo(name)
    least = prepared.solve().summary.smallest_feasible_bytes
    policies = policies_of(prepared)
    assert least <= min(peak for peak, _ in policies.values())
    assert set(policies) >= {"keep_all", "recompute_all", "chen_sqrt"}
    for policy, (peak, time_s) in policies.items():
        if policy == "keep_all" and method == "rockmate":
            continue
        solved = prepared.solve(peak, method, slots=500)
        assert solved.summary.step_time_s <= time_s * (1 + 1e-9), policy


@pytest.mark.parametrize("name", some(["gpt2", "resnet", "tied"], keep=["gpt2", "resnet"]))
def test_more_budget_is_never_slower(name: str) -> None:
    prepared = prepared_zoo(name)
    rich = prepared.solve().summary
    times = []
    for share in (0.0, 0.3, 0.6, 1.0):
        least = rich.smallest_feasible_bytes
        times.append(prepared.solve(least + int(share * (rich.device_peak_bytes - least))).summary.step_time_s)
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(rich.lower_bound_s)


def test_equal_inputs_give_an_equal_plan() -> None:
    prepared = prepared_zoo("gpt2")
    assert prepared.smallest() == prepared.smallest()


def test_the_hash_names_rows_configuration_and_budget() -> None:
    prepared = prepared_zoo("resnet")
    rich, tight = prepared.solve(), prepared.smallest()
    assert rich.summary.plan_hash != tight.summary.plan_hash
    assert prepared.solve(PLENTY - 1).summary.plan_hash != rich.summary.plan_hash
    assert rich.summary.configuration_hash == prepared.trace.meta.configuration_hash


def test_missing_options_are_named() -> None:
    prepared = prepared_zoo("resnet")
    lacking = [o for o in prepared.options if o.block_hash != prepared.blocks[1].block_hash]
    with pytest.raises(TableError, match=f"{prepared.blocks[1].block_hash}.*run the options stage"):
        solve_plan(prepared.trace, prepared.nodes, prepared.blocks, lacking, PlanRequest(PLENTY))


def test_eager_keeps_all_gradients_until_the_updates() -> None:
    prepared = prepared_zoo("gpt2")
    gradients = {prepared.trace.values[g.gradient_value].storage for g in prepared.trace.gradients}
    gradient_bytes = sum(prepared.trace.storages[s].nbytes for s in gradients)
    base = baseline_bytes(prepared.trace.storages)
    assert eager_peak_bytes(prepared.trace, prepared.nodes) >= base + gradient_bytes
    assert prepared.solve().summary.device_peak_bytes < eager_peak_bytes(prepared.trace, prepared.nodes)


def test_a_block_of_which_a_method_has_no_schedule_is_named() -> None:
    prepared = prepared_zoo("gpt2")
    assert {o.formulation for o in prepared.options}.isdisjoint({"tw_remat"})
    with pytest.raises(ParameterError, match=r"method tw_remat has no schedule of block 0 \(.+\) .* take auto here"):
        prepared.solve(method="tw_remat")


@pytest.mark.parametrize(
    "name", some(["tied", "gpt2_bf16", "lstm", "resnet_transformers"], keep=["tied", "resnet_transformers"])
)
def test_where_nothing_fits_other_tables_are_looked_at(name: str) -> None:
    """Sizes are rounded up to slots: of two tables now the one, now the other has the leaner sequence."""
    prepared = prepared_zoo(name)
    least: dict[str, int] = {}
    for method, slots in (("auto", 100), ("rockmate", 33), ("rotor", 100)):
        with pytest.raises(Infeasible) as caught:
            prepared.solve(1, method, slots)
        least[method] = caught.value.smallest_feasible_bytes
    assert least["auto"] <= min(least.values())
    prepared.judge(prepared.solve(least["auto"]), least["auto"])
