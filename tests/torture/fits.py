"""Cases of `fit`: its arguments, stored plans, saved steps, and Ctrl-C and kills while it trains and saves."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from tests.torture import forks, judge, mutations
from tests.torture.forks import Disturbance, Ended
from tests.torture.kinds import ROWS, Case, Place

WIDTH, STEPS = 32, 4
SAVED = "saved.safetensors"


def model() -> nn.Module:
    """With dropout."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*(part for layer in layers for part in layer))


def batch(number: int) -> torch.Tensor:
    """Of a step, and the dropout of that step."""
    torch.manual_seed(number)
    return torch.randn(200, WIDTH)


def square(outputs: Any, _batch: Any) -> torch.Tensor:
    """A loss."""
    return outputs.pow(2).mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)


ARGUMENTS: dict[str, Any] = {"device_budget": "75%", "loss": square, "cache_dir": "base"}


def plain() -> list[float]:
    """Losses of plain PyTorch."""
    trained = model()
    optimizer = adamw(trained.parameters())
    found = []
    for number in range(STEPS):
        loss = square(trained(batch(number)), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def training(
    *, saves: bool = False, loads: bool = False, given: dict[str, Any] | None = None, first: int = 0
) -> Callable[[], None]:
    """A script: plan, train, save; its losses on stdout, its mistakes as one line on stderr."""

    def work() -> None:
        from stowage.flows import fit
        from stowage.stages.ir.errors import StowageError

        trained = model()
        arguments = {"model": trained, "batch": batch(0), "optimizer": adamw, **ARGUMENTS, **(given or {})}
        before = _state(trained)
        try:
            step = fit(arguments.pop("model"), arguments.pop("batch"), arguments.pop("optimizer"), **arguments)
        except StowageError as error:
            _fail(error, "" if _state(trained) == before else "and the model was changed")
        try:
            start = first
            if loads:
                step.load(SAVED)
                start = STEPS // 2
            losses = []
            for number in range(start, STEPS):
                losses.append(float(step(batch(number))))
                if saves and number + 1 == STEPS // 2:
                    step.save(SAVED)
        except StowageError as error:
            _fail(error)
        print(json.dumps(losses))

    return work


def _fail(error: Exception, more: str = "") -> None:
    print(f"{'Traceback (most recent call last): ' if more else 'error: '}{error} {more}", file=sys.stderr)
    sys.exit(1)


def _state(module: nn.Module) -> list[Any]:
    return [
        [(n, p.detach().tolist(), p.requires_grad, p.grad is None) for n, p in module.named_parameters()],
        [(n, type(m).__name__, m.training, sorted(vars(m))) for n, m in module.named_modules()],
    ]


def _stores(place: Place) -> Path:
    """With everything that planning has stored, and a saved step."""
    ready = place.placement / "fit"
    if not ready.exists():
        ready.mkdir()
        ended = forks.run(training(saves=True), ready)
        alone = forks.run(lambda: print(json.dumps(plain())), ready)
        place.fit_reference = json.loads(alone.shown)
        if ended.code or json.loads(ended.shown.splitlines()[-1]) != place.fit_reference:
            raise RuntimeError(f"undisturbed, fit fails: {ended.said}{ended.shown}")
    folder = place.fresh()
    shutil.copytree(ready, folder)
    return folder


def _judged(place: Place, folder: Path, what: str, ended: Ended, first: int = 0) -> Case:
    fault = judge.fault(ended) or judge.left(folder)
    if not fault and ended.code == 0:
        found = json.loads(ended.shown.splitlines()[-1])
        if found != place.fit_reference[first:]:
            fault = f"losses {found} instead of {place.fit_reference[first:]}"
    return Case(what, fault, ended)


def plans(place: Place, rng: Random) -> Case:
    """Plans that `fit` has stored."""
    folder = _stores(place)
    files = sorted(p for name in ("solved", "plans") for p in (folder / "base" / name).rglob("*") if p.is_file())
    solved = [p for p in files if "solved" in p.parts]
    path = rng.choice(solved if rng.random() < 0.8 else files)
    if path.suffix == ".parquet" and rng.random() < 0.8:
        what = mutations.table(rng, path, ROWS)
    elif path.suffix == ".json" and rng.random() < 0.9:
        what = mutations.record(rng, path)
    else:
        what = mutations.raw_bytes(rng, path)
    return _judged(place, folder, what, forks.run(training(), folder))


def stores(place: Place, rng: Random) -> Case:
    """Costs, options and the device's description that `fit` has stored."""
    folder = _stores(place)
    shutil.rmtree(folder / "base" / "solved")
    files = sorted(p for n in ("costs", "options", "devices") for p in (folder / "base" / n).rglob("*") if p.is_file())
    path = rng.choice([p for p in files if p.suffix in (".parquet", ".json")])
    if rng.random() < 0.3:
        what = mutations.raw_bytes(rng, path)
    else:
        what = mutations.table(rng, path, ROWS) if path.suffix == ".parquet" else mutations.record(rng, path)
    return _judged(place, folder, what, forks.run(training(), folder))


def saved_steps(place: Place, rng: Random) -> Case:
    """What `step.save` has written."""
    from tests.torture.kinds import _metadata

    folder = _stores(place)
    path = folder / SAVED
    what = mutations.raw_bytes(rng, path) if rng.random() < 0.6 else _metadata(rng, path)
    ended = forks.run(training(loads=True), folder)
    return _judged(place, folder, what, ended, STEPS // 2)


NAMES = ("device_budget", "loss", "forward", "forms", "resize", "new_shapes", "programs", "accumulate", "max_grad_norm")
NAMES += ("method", "host_budget", "disk_budget", "offload_dir", "weights", "cache_dir", "quick", "check")
NAMES += ("batch", "optimizer", "model")


def arguments(place: Place, rng: Random) -> Case:
    """Arguments of `fit`."""
    folder = _stores(place)
    name = rng.choice(NAMES)
    given = {name: mutations.value(rng, ARGUMENTS.get(name))}
    ended = forks.run(training(given=given), folder)
    what = f"{name} = {str(given[name])[:60]!r}"
    fault = judge.fault(ended) or judge.left(folder)
    if not fault and ended.code == 0 and name in ("device_budget", "quick", "check", "programs", "cache_dir", "method"):
        return _judged(place, folder, what, ended)
    return Case(what, fault, ended)


def interrupts(place: Place, rng: Random) -> Case:
    """Ctrl-C in a script that plans, trains and saves; then once more."""
    return _broken(place, rng, signal.SIGINT)


def kills(place: Place, rng: Random) -> Case:
    """`kill -9` of it."""
    return _broken(place, rng, signal.SIGKILL)


def _broken(place: Place, rng: Random, number: int) -> Case:
    folder = _stores(place)
    if rng.random() < 0.7:
        shutil.rmtree(folder / "base")
    loads = rng.random() < 0.3
    if not loads:
        (folder / SAVED).unlink()
    after_s = rng.random() * 1.5
    what = f"signal {number} after {after_s:.2f} s"
    work = training(saves=not loads, loads=loads)
    ended = forks.run(work, folder, Disturbance(number, after_s))
    if number == signal.SIGINT and ended.code not in (0, 130, 1):
        return Case(what, f"exit status {ended.code}", ended)
    if number == signal.SIGINT and (fault := judge.left(folder)):
        return Case(what, fault, ended)
    again = forks.run(work, folder)
    if again.code:
        return Case(what, f"the next run failed: {again.said[-300:]}", again)
    return _judged(place, folder, what, again, STEPS // 2 if loads else 0)
