"""What `gpu ranks` asks of its contestants, and that each of them trains: a dry run on a CPU, also of a card's list."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from stowage.flows import gpu
from stowage.flows.api import fit as _fit
from stowage.flows.api import shard as _shard
from stowage.flows.benchmarks.gpu.ranks import contestant as contestants
from stowage.flows.benchmarks.gpu.ranks import rows
from stowage.flows.benchmarks.gpu.ranks.spread import Spread, spread_of, spread_of_rounds
from stowage.flows.benchmarks.gpu.ranks.whole import SMALL, RanksEffort, job_of_ranks, steps_of_ranks
from stowage.flows.benchmarks.gpu.steps import CommandStep, StepResult
from stowage.stages.device import device_of
from stowage.stages.ir.errors import ParameterError
from stowage.stages.ir.table import write_record
from stowage.stages.workload.models import build_model
from tests.devices import made_up_cpu
from tests.sharding.processes import on_ranks

OF_CPU = ["fsdp2", "fsdp2-kept", "fsdp2-checkpointed", "fsdp2-kept-checkpointed", "fsdp2-prefetch"]
HOST_BYTES = 10 << 30


def steps(device: str, folder: Path, rounds: int = 1) -> list[CommandStep]:
    return steps_of_ranks(job_of_ranks(device), 4, folder, RanksEffort(3, rounds, quick=True), HOST_BYTES)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_list_of_each_device(device: str, tmp_path: Path) -> None:
    plain = [*OF_CPU, *["fsdp2-offloaded"] * (device == "cuda")]
    budgets = [name for name in plain if name != "fsdp2-prefetch"] + ["ddp"]
    within = [f"{kind}-{name}" for name in budgets for kind in ("planned", "sharded")]
    found = steps(device, tmp_path)
    assert [step.name for step in found] == ["rates", "ddp", *plain, *within, "compare"]
    by_name = {step.name: step for step in found}
    for name in within:
        asked = by_name[name].asked
        assert (asked["contestant"], asked["budget_of"]) == tuple(name.split("-", 1))
        assert by_name[name].after == (asked["budget_of"],)
        assert by_name[name].besides == {"host_bytes": HOST_BYTES}
        assert "host_bytes" not in asked, "another call finds another number, and goes on"
        assert asked["fraction"] == (0.6 if name.endswith("-ddp") else 1.0)
    checkpointed = {name for name in within if by_name[name].asked.get("checkpointed")}
    assert checkpointed == {"sharded-fsdp2-checkpointed", "sharded-fsdp2-kept-checkpointed", "sharded-ddp"}
    assert by_name["fsdp2-kept-checkpointed"].asked["reshard"] is False
    assert by_name["fsdp2-kept-checkpointed"].asked["checkpointed"] is True
    assert by_name["fsdp2-prefetch"].asked["prefetch"] == 2
    if device == "cuda":
        assert by_name["fsdp2-offloaded"].asked["offloaded"] is True


def test_rounds_come_in_turn_after_what_is_compared(tmp_path: Path) -> None:
    found = steps("cpu", tmp_path, rounds=3)
    once = [s.name for s in found if s.asked["kind"] == "ranks-train" and "again" not in s.asked]
    later = [s for s in found if "again" in s.asked]
    assert [s.asked["again"] for s in later] == once * 2
    assert [s.name for s in found][-len(later) :] == [s.name for s in later]
    assert len({s.name for s in found}) == len(found)
    assert all(s.asked["again"] in s.after for s in later)
    (compared,) = (s for s in found if s.name == "compare")
    assert set(compared.asked["names"]) == set(once) - {"ddp"}


def test_times_of_all_rounds_are_one_spread(tmp_path: Path) -> None:
    found = steps("cpu", tmp_path, rounds=2)
    ddp = next(step for step in found if step.name == "ddp")
    results = {
        "ddp": StepResult("ddp", "held", numbers={"seconds": [1.0, 2.0]}),
        "ddp-round-2": StepResult("ddp-round-2", "held", numbers={"seconds": [3.0, 4.0, 5.0]}),
        "fsdp2": StepResult("fsdp2", "held", numbers={"seconds": [9.0]}),
    }
    assert spread_of_rounds(ddp, found, results) == Spread(2.0, 3.0, 4.0)
    results["ddp-round-2"] = StepResult("ddp-round-2", "fell")
    assert spread_of_rounds(ddp, found, results).median_s == 1.5
    assert spread_of([7.0]) == Spread(7.0, 7.0, 7.0)


@dataclass
class _Told:
    """What planners were asked for."""

    fit: dict[str, Any]
    shard: dict[str, Any]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Told:
    """Planners that plan nothing, in the second of four ranks."""
    found = _Told({}, {})

    def fit(*given: Any, **asked: Any) -> Any:
        found.fit.update(asked)
        return SimpleNamespace(contents=dict, plan=SimpleNamespace(device_peak_bytes=5))

    def shard(*given: Any, **asked: Any) -> Any:
        found.shard.update(asked)
        return SimpleNamespace(choices=(), chosen_by="exact", predicted_peak_bytes=6)

    monkeypatch.setattr(_fit, "fit", fit)
    monkeypatch.setattr(_shard, "shard", shard)
    monkeypatch.setattr(contestants, "batch_of", lambda job, iteration: {})
    monkeypatch.setattr(contestants.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(contestants.dist, "get_rank", lambda: 1)
    return found


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_on_cards_may_use_the_host(device: str, told: _Told, tmp_path: Path) -> None:
    """A plan has a rank's share, and `shard`, which plans for all ranks together, has all of it."""
    job = job_of_ranks(device)
    (step,) = (s for s in steps(device, tmp_path) if s.name == "planned-fsdp2")
    asked = {**step.asked, **step.besides, "budget_bytes": 7, "stores": str(tmp_path)}
    model = nn.Linear(2, 2)
    assert contestants.planned(job, model, asked).predicted_bytes == 5
    assert contestants.sharded(job, model, asked).predicted_bytes == 6
    on_cards = device == "cuda"
    assert told.fit["host_budget"] == (HOST_BYTES // 4 if on_cards else None)
    assert told.shard["host_budget"] == (HOST_BYTES if on_cards else None)
    for given in (told.fit, told.shard):
        assert given["device_budget"] == 7
        assert given["cache_dir"] == tmp_path / "rank-1"


@pytest.mark.parametrize("words", [[], ["--host-gb", "2"]])
def test_the_command_gives_what_the_host_has(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def run_ranks(out: Path, job: Any, ranks: int, say: Any, **more: Any) -> dict[str, StepResult]:
        asked.update(more, job=job, ranks=ranks)
        (out / "ranks.md").write_text("a page")
        return {}

    monkeypatch.setattr(gpu, "run_ranks", run_ranks)
    monkeypatch.setattr(gpu, "available_bytes", lambda: 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    call = ["ranks", "--out", str(tmp_path), "--model", "t5", "--rounds", "5", "--steps", "4", *words]
    assert gpu.main(call) == gpu.UNFINISHED_STATUS
    assert asked["host_bytes"] == (2 * 10**9 if words else 850)
    assert asked["effort"] == RanksEffort(4, 5, quick=False)
    assert (asked["ranks"], asked["job"].architecture, asked["job"].device) == (8, "t5", "cuda")


def test_blocks_are_those_of_the_outermost_lists() -> None:
    t5 = job_of_ranks("cpu", model="t5")
    model = build_model(t5.architecture, t5.overrides, seed=0)
    assert [type(block).__name__ for block in contestants.blocks_of(model)] == ["T5Block"] * 4
    gpt2 = job_of_ranks("cpu")
    assert len(contestants.blocks_of(build_model(gpt2.architecture, gpt2.overrides, seed=0))) == 2


def _dry_run(model: str, folder: Path, names: list[str]) -> dict[str, Any]:
    """Run contestants of a card's list as a CPU can, one step each, as rank 0 would write it."""
    job = job_of_ranks("cpu", model=model)
    asked_of = {step.name: step.asked for step in steps("cuda", folder)}
    found: dict[str, Any] = {}
    description = folder / f"rank-{dist.get_rank()}" / "devices" / f"{device_of('cpu').fingerprint()}.json"
    write_record(description, made_up_cpu())
    for name in names:
        at = folder / f"{name}.{dist.get_rank()}.json"
        asked = {**asked_of[name], "steps": 1, "stores": str(folder), "found": str(at)}
        asked |= {"job": asdict(job), "host_bytes": HOST_BYTES, "budget_bytes": 1 << 30}
        if name == "sharded-fsdp2":
            asked["budget_bytes"] = 1 << 19
        contestants._train(job, asked)
        dist.barrier()
        if dist.get_rank() == 0:
            found[name] = json.loads(at.read_text())
    return found


def _check(found: dict[str, Any]) -> None:
    """Two ranks give the numbers of DistributedDataParallel, whoever trains; what does not fit says what would."""
    refused = found.pop("sharded-fsdp2")
    assert refused["needed_bytes"] > 1 << 19
    assert "cannot be met" in refused["refused"]
    for name, one in found.items():
        for own, expected in zip(one["losses"], found["ddp"]["losses"], strict=True):
            assert own == pytest.approx(expected), name
        assert len(one["seconds"]) == 1
        assert one["peak_bytes"] > 0
        assert (one["predicted_bytes"] is not None) == name.startswith(("planned", "sharded"))


def test_each_contestant_trains_on_two_ranks(tmp_path: Path) -> None:
    names = ["ddp", *OF_CPU, "fsdp2-offloaded", "sharded-fsdp2-kept", "sharded-fsdp2"]
    first, _ = on_ranks(2, _dry_run, "gpt2", tmp_path, names)
    assert list(first) == names
    _check(first)


@pytest.mark.long
@pytest.mark.parametrize("model", SMALL)
def test_plans_and_checkpointed_blocks_train_on_two_ranks(model: str, tmp_path: Path) -> None:
    names = ["ddp", *OF_CPU, "planned-fsdp2-kept", "sharded-fsdp2-checkpointed", "sharded-fsdp2"]
    first, _ = on_ranks(2, _dry_run, model, tmp_path, names)
    _check(first)


def test_the_page_is_of_one_model(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="There is no shape of 'bert'"):
        rows.run_two_ranks(tmp_path, print, "bert")
    with pytest.raises(ParameterError, match="--write is for gpt2"):
        rows.check_written("t5", written=True)
    rows.check_written("t5", written=False)
    rows.check_written("gpt2", written=True)
