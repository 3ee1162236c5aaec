"""The rematerialization benchmark: a tiny run of it, what stands beside plans, and planning against depth."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import matplotlib.image
import pytest
import torch
from matplotlib.axes import Axes

from stowage.flows.benchmarks.child_process import Served
from stowage.flows.benchmarks.remat import plans as _remat_plans
from stowage.flows.benchmarks.remat.contestant import digest
from stowage.flows.benchmarks.remat.figure import Panel, Point, remat_figure
from stowage.flows.benchmarks.remat.models import MODELS, build
from stowage.flows.benchmarks.remat.names import CHECKPOINTING, EAGER, EVERY_ROOT, MEMORY_BUDGET
from stowage.flows.benchmarks.remat.peers import BACKENDS, available, make_peer
from stowage.flows.benchmarks.remat.points import RematJob, job_of, remat_rows, run_remat
from stowage.flows.benchmarks.remat.requested_plans import peaks_to_match
from stowage.flows.benchmarks.remat.rows import (
    RematRow,
    accuracy,
    comparison,
    describe_comparison,
    markdown_of,
    panel_of,
    seemed_slower,
)
from stowage.flows.benchmarks.remat.turns import MOST_ROUNDS, Turns
from stowage.flows.benchmarks.scaling import depth as _remat_depth
from stowage.flows.benchmarks.scaling.depth import EFFORT, DepthJob, depth_job, depth_rows, run_depth
from stowage.flows.benchmarks.scaling.growth import GrowthRow
from stowage.flows.pipeline.project import find_root
from stowage.flows.planning.step import QUICK, Costing, Effort, StepToPlan, cost_step
from stowage.stages.ir.errors import MIB, ParameterError, StowageError, size_text
from stowage.stages.ir.table import read_rows
from tests.matrix import some

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model, a peer, a budget that cannot be met and three that can: planned once, each measured in its own
    process."""
    monkeypatch.setattr(
        "stowage.flows.benchmarks.remat.points.unlike_predicted", lambda rows: []
    )  # one round says little of time
    said: list[str] = []
    how: dict[str, Any] = {"size": "tiny", "rounds": 1, "timed_s": 0.0, "quick": True, "threads": 1}
    job = RematJob(models=("mixer",), methods=("auto",), shares=(0.01, 0.7), peers=(EVERY_ROOT,), **how)
    table = run_remat(job, tmp_path, said.append, root=ROOT)
    rows = read_rows(tmp_path / "remat.parquet", RematRow)
    peer, impossible, wide, smallest, matched = rows
    assert (peer.contestant, peer.setting) == (EVERY_ROOT, "")
    settings = ["1%", "70%", "smallest", f"in {size_text(peer.peak_bytes)}"]
    assert [(r.contestant, r.setting) for r in rows[1:]] == [("auto", setting) for setting in settings]
    assert peer.equal
    assert smallest.peak_bytes < matched.peak_bytes <= peer.peak_bytes
    assert impossible.note.startswith("no plan: the smallest feasible budget is")
    assert math.isnan(impossible.overhead)
    for r in (wide, smallest, matched):
        assert r.note == ""
        assert r.equal, "loss and gradients"
        assert r.predicted_peak_bytes <= r.budget_bytes
        assert abs(r.peak_bytes - r.predicted_peak_bytes) <= max(0.02 * r.predicted_peak_bytes, MIB / 64)
        assert r.peak_bytes <= r.budget_bytes < r.eager_peak_bytes
        assert r.predicted_overhead > 0
        assert r.rounds == 1
        assert r.time_s > 0
        assert r.overhead == pytest.approx(r.time_s / r.eager_time_s - 1)
    assert wide.activation_share <= 0.7
    assert smallest.activation_share < 0.5
    assert len(said) in (1 + len(rows), 2 + len(rows)), "the peer may be looked at again"
    assert (tmp_path / "remat.md").read_text() == table + "\n"
    assert len(table.split("\n\n")[0].splitlines()) == 2 + len(rows)
    assert " of 3 plans took, relative to plain PyTorch" in table
    assert "; the peaks of 3 were within 2% or 1 MiB of the prediction, 0 above the budget.\n" in table
    assert table.endswith("Its smallest peak was at or below all of theirs for 1 of 1 models.")
    assert (tmp_path / "remat_mixer.png").read_bytes() == (tmp_path / "remat.png").read_bytes()
    assert matplotlib.image.imread(io.BytesIO((tmp_path / "remat.png").read_bytes())).shape[1] == 1440


def test_plans_are_made_for_peaks_that_no_other_plan_stands_for() -> None:
    assert peaks_to_match([500, 505, 300, 297, 900, 100], [99, 600], 900) == [297, 500]
    assert peaks_to_match([500], [501], 900) == [500], "a plan that takes more does not stand for it"
    assert peaks_to_match([], [1], 900) == []


def run(name: str, peer: str, setting: float = 1.0) -> tuple[str, int, str]:
    """Digest, peak and backend of one peer on one model."""
    case = build(name, "tiny")
    parameters = list(case.model.parameters())
    contestant = make_peer(peer, case, setting)
    contestant(case.batch)
    for p in parameters:
        p.grad = None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = contestant.measure(case.batch)
    assert all(p.grad is not None for p in parameters)
    return digest(found.loss, case, parameters), found.peak_bytes, contestant.how


@pytest.mark.parametrize(
    ("name", "peer"),
    some(
        [
            ("gpt2", CHECKPOINTING),
            ("t5", CHECKPOINTING),
            ("gpt2", EVERY_ROOT),
            ("transformer", EVERY_ROOT),
            ("mixer", EVERY_ROOT),
            ("resnet101", EVERY_ROOT),
            ("regnet", EVERY_ROOT),
            ("unet", EVERY_ROOT),
            ("uno", EVERY_ROOT),
        ],
        keep=[("gpt2", CHECKPOINTING), ("transformer", EVERY_ROOT), ("unet", EVERY_ROOT)],
    ),
)
def test_checkpointing_is_exact_and_saves_memory(name: str, peer: str) -> None:
    assert peer in available(build(name, "tiny"))
    (expected, whole, _), (found, peak, _) = run(name, EAGER), run(name, peer)
    assert found == expected
    assert peak < whole


def test_a_digest_tells_numbers_apart() -> None:
    case = build("mixer", "tiny")
    parameters = list(case.model.parameters())
    make_peer(EAGER, case)(case.batch)
    before = digest(1.0, case, parameters)
    assert digest(math.nextafter(1.0, 2.0), case, parameters) != before
    assert parameters[-1].grad is not None
    parameters[-1].grad[0] = parameters[-1].grad[0].nextafter(torch.tensor(2.0))
    assert digest(1.0, case, parameters) != before


@pytest.mark.parametrize("name", some(["unet", "mixer"], keep=["mixer"]))
def test_the_memory_budget_of_pytorch_saves_memory(name: str) -> None:
    """The mixer's program does not run in the first backend of torch 2.13."""
    whole = run(name, EAGER)[1]
    _, peak, backend = run(name, MEMORY_BUDGET, 0.1)
    assert backend in BACKENDS
    assert peak < whole


def test_what_a_model_has_decides_who_takes_part() -> None:
    assert CHECKPOINTING not in available(build("unet", "tiny"))
    assert EVERY_ROOT not in available(build("lstm", "tiny"))
    with pytest.raises(StowageError, match="There is no peer 'magic': take one of plain PyTorch, "):
        make_peer("magic", build("unet", "tiny"))


def test_late_and_wrong_answers_are_sentences(tmp_path: Path) -> None:
    request = {"model": "mixer", "size": "tiny", "depth": None, "stores": str(tmp_path), "quick": True, "threads": 1}
    module, root = "stowage.flows.benchmarks.remat.contestant", find_root(ROOT)
    with pytest.raises(StowageError, match=r"slow: no answer within 0 s\."):
        Served("slow", module, request | {"runs": EAGER, "setting": 1.0}, root, limit_s=0.01)
    with pytest.raises(StowageError, match="wrong: There is no peer 'magic'"):
        Served("wrong", module, request | {"runs": "magic", "setting": 1.0}, root)


def test_options_of_the_command() -> None:
    job = job_of("unet, gpt2", "rockmate", "30,50%", rounds=3, threads=1, quick=True)
    assert (job.models, job.methods, job.shares) == (("unet", "gpt2"), ("rockmate",), (0.3, 0.5))
    assert (job.rounds, job.threads, job.quick) == (3, 1, True)
    assert job_of("", "", "", rounds=7, threads=0, quick=False) == RematJob()
    assert sorted(RematJob().models) == sorted(MODELS)
    with pytest.raises(ParameterError, match="--shares"):
        job_of("", "", "half", rounds=1, threads=0, quick=False)
    with pytest.raises(ParameterError, match="--models names resnet: take some of unet"):
        run_remat(RematJob(models=("resnet",)), Path("nowhere"), print, root=ROOT)
    with pytest.raises(ParameterError, match="--models names unet: remat-depth takes"):
        depth_job("unet", "", "")
    with pytest.raises(ParameterError, match="--layers names 0, x"):
        depth_job("", "", "0,2,x")


def test_the_table_says_what_was_measured() -> None:
    planned = RematRow("unet", "auto", "50%", 2 * MIB, 2 * MIB, 1.05, 0.08, 1.0, "rockmate", 1.0)
    rows = [
        RematRow("unet", MEMORY_BUDGET, "0.3", peak_bytes=3 * MIB, activation_share=0.7, overhead=0.2),
        replace(planned, peak_bytes=2 * MIB, activation_share=0.5, time_s=1.1, overhead=0.1, equal=True),
        RematRow("unet", MEMORY_BUDGET, "0.1", peak_bytes=MIB, activation_share=0.2, overhead=0.2),
        replace(planned, setting="10%", budget_bytes=MIB, note="no plan"),
    ]
    peer, plan, lean, nothing, _, predicted, _, compared = markdown_of(rows).splitlines()[2:]
    assert peer == "| unet | activation_memory_budget | 0.3 |  | 3.0 MiB | 70% | +20.0% |  |  | +10.0% |  | no |"
    assert plan == (
        "| unet | auto (rockmate) | 50% | 2.0 MiB | 2.0 MiB | 50% | **+10.0%** | +8.0% | 1.05 |  | 1.0 s | yes |"
    )
    assert lean == "| unet | activation_memory_budget | 0.1 |  | 1.0 MiB | 20% | +20.0% |  |  |  |  | no |"
    assert nothing == "| unet | auto | 10% | 1.0 MiB | no plan |  |  |  |  |  |  |  |"
    assert len({line.count("|") for line in markdown_of(rows).splitlines()[:6]}) == 1, "as many cells in every line"
    assert predicted.startswith("1 of 1 plans took, relative to plain PyTorch then and there, within 10%")
    assert compared.startswith("auto was no slower than 1 of 1 points of other methods within the same peak. Its")
    assert compared.endswith("for 0 of 1 models."), "the leanest has 1 MiB"


def test_what_the_rows_say_of_predictions_and_of_others() -> None:
    """Plans that share a measurement count once; who is faster, leaner or far from the prediction is named."""
    plan = RematRow("unet", "auto", "50%", 4 * MIB, 4 * MIB, 1.0, plain_time_s=0.8, peak_bytes=4 * MIB, overhead=0.5)
    rows = [
        RematRow("unet", EAGER, "", peak_bytes=9 * MIB, overhead=-0.5),
        RematRow("unet", CHECKPOINTING, "", peak_bytes=4 * MIB, overhead=0.4),
        plan,
        replace(plan, setting="40%"),
        replace(plan, setting="30%", peak_bytes=6 * MIB, overhead=0.25),
        replace(plan, contestant="rotor", peak_bytes=8 * MIB, overhead=0.3, predicted_peak_bytes=8 * MIB),
    ]
    assert accuracy(rows) == (
        "2 of 3 plans took, relative to plain PyTorch then and there, within 10% of the predicted time (from +0.0% "
        "to +20.0%, median +4.0%); the peaks of 2 were within 2% or 1 MiB of the prediction, 2 above the budget."
    )
    assert comparison(rows) == (
        f"auto was no slower than 1 of 2 points of other methods within the same peak; slower than unet, "
        f"{CHECKPOINTING}. Its smallest peak was at or below all of theirs for 1 of 1 models."
    )
    assert accuracy(rows[:2]) == ""
    assert comparison([rows[0], plan]) == ""


def test_who_seemed_faster_is_looked_at_again() -> None:
    """Chance is no reason to call a plan slower; where it is slower indeed, it is."""
    plan = RematRow("unet", "auto", "50%", 4 * MIB, 4 * MIB, 1.0, peak_bytes=4 * MIB, overhead=0.2)
    peer = RematRow("unet", CHECKPOINTING, "", peak_bytes=4 * MIB, overhead=0.1)
    chance = replace(peer, ours_over_it=-0.01, by_chance=0.7)
    slower = replace(peer, ours_over_it=0.06, by_chance=0.01)
    assert seemed_slower([plan, peer, replace(peer, overhead=0.3)]) == [(plan, peer)]
    assert comparison([plan, chance]).startswith(
        "auto was no slower than 1 of 1 points of other methods within the same peak (1 of them in turns with each "
        "other). Its"
    )
    assert "no slower than 0 of 1 points" in comparison([plan, slower])
    assert f"in turns with each other); slower than unet, {CHECKPOINTING}. Its" in comparison([plan, slower])
    assert "| +20.0% (in turns -1.0%) |" in markdown_of([plan, chance])
    assert describe_comparison(plan, slower) == f"unet, auto 50% in turns with {CHECKPOINTING}: +6.0% (by chance 1%)"


class Timed:
    """Stands in for a process whose iterations take given times."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = iter((1.0, *times_s))

    def ask(self, seed: int) -> dict[str, Any]:
        del seed
        return {"time_s": next(self._times_s)}


def test_turns_tell_slower_from_chance() -> None:
    """A binomial law: of 4 rounds 3 or more by chance in 5 of 16 cases."""
    ours: Any = Timed(2.0, 1.1, 1.1, 1.0)
    ratio, chance = Turns(rounds=4, timed_s=0.0).compare(ours, cast(Any, Timed(1.0, 1.0, 1.0, 2.0)))
    assert ratio == pytest.approx(0.1)
    assert chance == 5 / 16


def test_nothing_to_compare_where_ours_takes_more() -> None:
    """A point leaner than every plan has none to stand beside."""
    lean = RematRow("unet", CHECKPOINTING, "", peak_bytes=MIB, overhead=0.4)
    assert comparison([lean]) == ""


def lines_of(axes: Axes) -> dict[str, list[list[float]]]:
    """Label -> points."""
    return {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}


def test_the_picture_has_a_line_a_method_and_marks_for_peers() -> None:
    planned = Panel({"auto": [Point(MIB, 0.5, 2 * MIB, 0.25), Point(3 * MIB, 0.1)]}, {"peer": [Point(4 * MIB, 0.0)]})
    (axes,) = remat_figure({"unet": planned}).axes
    assert lines_of(axes) == {"peer": [[4, 0]], "auto": [[1, 50], [3, 10]], "auto, predicted": [[2, 25]]}
    assert axes.get_title() == "unet"
    assert axes.get_yscale() == "linear"


def test_models_share_colours_and_a_legend() -> None:
    one = Panel({"auto": [Point(MIB, 0.5)], "rotor": [Point(MIB, 0.7)]}, {"peer": [Point(4 * MIB, 0.0)]})
    other = Panel({"rotor": [Point(2 * MIB, 30.0)]}, {"peer": [Point(3 * MIB, 0.0)]})
    figure = remat_figure({"unet": one, "lstm": other})
    left, right = figure.axes
    colours = [{str(line.get_label()): line.get_color() for line in axes.lines} for axes in (left, right)]
    assert colours[0]["rotor"] == colours[1]["rotor"] != colours[0]["auto"]
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "symlog"), "what takes 31 times as long is high up"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["auto", "rotor", "peer"]


def test_a_panel_knows_the_activation_budget() -> None:
    """10 MiB are no activations, and keeping everything takes 40 MiB of them."""
    rows = [
        RematRow("unet", EAGER, "", peak_bytes=50 * MIB, activation_share=1.0, overhead=0.0),
        RematRow("unet", "rotor", "5%", note="no plan"),
        RematRow(
            "unet",
            "auto",
            "50%",
            31 * MIB,
            30 * MIB,
            1.0,
            0.08,
            peak_bytes=30 * MIB,
            activation_share=0.5,
            overhead=0.1,
        ),
    ]
    panel = panel_of(rows)
    (plain,) = panel.peers[EAGER]
    assert (plain.peak_bytes, plain.overhead, plain.predicted_peak_bytes) == (50 * MIB, 0.0, -1)
    assert panel.methods == {"rotor": [], "auto": [Point(30 * MIB, 0.1, 30 * MIB, 0.08)]}
    assert (panel.fixed_bytes, panel.activation_bytes) == (10 * MIB, 40 * MIB)
    axes = remat_figure({"unet": panel}).axes[0]
    (above,) = axes.child_axes
    assert above.get_xlabel() == "share of the activation budget"
    assert panel_of(rows[:2]).activation_bytes == -1


class Scripted:
    """Stands in for a process: two methods find the same plan, one planner dies, one model cannot be traced."""

    begun: ClassVar[list[str]] = []
    peers: ClassVar[list[str]] = [EAGER]

    def __init__(self, name: str, module: str, request: dict[str, Any], root: Path, **limits: Any) -> None:
        del module, root, limits
        self.begun.append(name)
        if request["model"] == "lstm":
            raise StowageError(f"{name}: it cannot be traced")
        planner = {"calls": 9, "fixed_bytes": MIB, "keep_all_peak_bytes": 5 * MIB, "peers": self.peers}
        planner |= {"keep_all_time_s": 1.0, "plain_time_s": 1.0}
        self.about: dict[str, Any] = planner if request["runs"] == "planner" else {}
        self.time_s = 0.1 * len(self.begun)

    def ask(self, request: Any) -> dict[str, Any]:
        if isinstance(request, int):
            return {"time_s": self.time_s, "digest": "same"}
        method, *share = request
        if isinstance(method, int):
            return {"peak_bytes": 3 * MIB, "digest": "same"}
        if method == "rotor":
            raise StowageError("the planner ended early")
        plan = {"plan_s": 1.0, "predicted_peak_bytes": MIB, "predicted_time_s": 1.0, "predicted_overhead": 0.1}
        return plan | {"found_by": "rockmate", "plain_time_s": 1.0} | {"budget": 3 * MIB, "plan_hash": str(share)}

    def close(self) -> None:
        pass


def test_the_same_plan_is_measured_once_and_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.Served", Scripted)
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.unlike_predicted", lambda rows: [])
    methods = ("auto", "rotor", "rockmate")
    job = RematJob(models=("lstm", "unet"), methods=methods, shares=(0.5,), peers=(), rounds=1, timed_s=1.15)
    unplanned, *rows = remat_rows(job, tmp_path, ROOT)
    assert (unplanned.model, unplanned.note) == ("lstm", "planner of lstm: it cannot be traced")
    found = {(r.contestant, r.setting): r for r in rows}
    assert list(found) == [(m, s) for m in methods for s in ("50%", "smallest")]
    assert found["rotor", "50%"].note == found["rotor", "smallest"].note == "no plan: the planner ended early"
    for setting in ("50%", "smallest"):
        one, other = found["auto", setting], found["rockmate", setting]
        assert one.time_s > 0
        assert one.rounds == math.ceil(job.timed_s / one.time_s), "short iterations are repeated"
        assert replace(one, contestant="rockmate") == other
    begun = [name for name in Scripted.begun if name.startswith(("auto", "rockmate"))]
    assert begun == ["auto 50%", "auto smallest"], "plans that were measured"
    assert Scripted.begun.count("planner of unet") == 3, "the first, and one after each that ended"


def test_iterations_are_repeated_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.Served", Scripted)
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.unlike_predicted", lambda rows: [])
    for rounds, timed_s, expected in ((3, 0.0, 3), (3, 1e6, MOST_ROUNDS), (MOST_ROUNDS + 1, 1e6, MOST_ROUNDS + 1)):
        job = RematJob(models=("unet",), methods=("auto",), shares=(), peers=(EAGER,), rounds=rounds, timed_s=timed_s)
        rows = list(remat_rows(job, tmp_path, ROOT))
        assert [r.contestant for r in rows[:2]] == [EAGER, "auto"]
        assert {r.rounds for r in rows} == {expected}


def test_a_faster_peer_is_measured_in_turns_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process here is slower than those before it: a peer comes before the plans."""
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.Served", Scripted)
    monkeypatch.setattr("stowage.flows.benchmarks.remat.points.unlike_predicted", lambda rows: [])
    job = RematJob(models=("unet",), methods=("auto",), shares=(), peers=(EVERY_ROOT,), rounds=1, timed_s=0.0)
    monkeypatch.setattr(Scripted, "peers", [EVERY_ROOT])
    run_remat(job, tmp_path, lambda text: None, tmp_path, ROOT)
    peer, *plans = read_rows(tmp_path / "remat.parquet", RematRow)
    assert peer.contestant == EVERY_ROOT, "once"
    assert {r.contestant for r in plans} == {"auto"}
    assert peer.ours_over_it < 0, "the peer's second process is the slower one"
    assert peer.by_chance == 1
    assert all(math.isnan(r.ours_over_it) for r in plans)


def test_plain_pytorch_takes_its_share_of_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [9.0, *[3.0, 1.0, 2.0, 5.0] * 20]
    seconds = iter([first, *others])
    clock, iterations = [0.0], [0]

    def iteration(batch: Any) -> None:
        clock[0] += next(seconds)
        iterations[0] += 1

    monkeypatch.setattr(_remat_plans, "make_peer", lambda name, case: iteration)
    monkeypatch.setattr(_remat_plans.time, "perf_counter", lambda: clock[0])
    plain = _remat_plans._PlainAmongCalls(build("unet", "tiny"))
    for call in range(60):
        clock[0] += 1.0  # a look at a call
        plain.look(call, 60)
    counted = others[: iterations[0] - 1]
    assert sum(counted) / (60.0 + sum(counted)) == pytest.approx(_remat_plans.PLAIN_SHARE, abs=0.03)
    assert plain.time_s() == pytest.approx(sum(counted) / len(counted))


@pytest.mark.long
def test_planning_is_timed_against_depth(tmp_path: Path) -> None:
    said: list[str] = []
    text = run_depth(DepthJob(("gpt2",), ("auto",), (2, 3), "tiny", QUICK), tmp_path, said.append)
    rows = read_rows(tmp_path / "remat_depth.parquet", GrowthRow)
    stages = ["trace", "profile", "partition", "options", "solve", "codegen", "total"]
    assert [(r.layers, r.stage) for r in rows] == [(n, stage) for n in (2, 3) for stage in stages]
    assert rows[-1].calls > rows[0].calls
    assert rows[-1].overhead > 0
    assert rows[-1].seconds == pytest.approx(sum(r.seconds for r in rows[7:-1]))
    assert text.startswith("gpt2, auto, 3 over 2 layers: trace ")
    assert len(said) == 2
    assert matplotlib.image.imread(io.BytesIO((tmp_path / "remat_depth.png").read_bytes())).shape[1] == 1500


@pytest.mark.long
def test_planning_is_timed_on_measured_costs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Costing] = []

    def spied(step: StepToPlan, how: Costing) -> Any:
        asked.append(how)
        return cost_step(step, how)

    monkeypatch.setattr(_remat_depth, "cost_step", spied)
    assert (depth_job("", "", "", measured=True).effort, depth_job("", "", "").effort) == (Effort(), EFFORT)
    for measured in (True, False):
        said: list[str] = []
        (*_, total) = depth_rows(DepthJob(("gpt2",), ("auto",), (2,), "tiny", QUICK, measured), said.append)
        assert total.overhead > 0
        assert "s of processor time, " in said[0]
    assert [how.costs for how in asked] == ["measured", "roofline"]
