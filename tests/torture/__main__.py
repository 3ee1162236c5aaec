"""Torture the pipeline and its files: `python -m tests.torture --minutes 20 --seed 7`.

Kinds of cases take turns until the time is over, or each has had `--cases`. The first seed is printed; a case that
fails prints its own, and `--only KIND --case-seed SEED` repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.table import Table

from tests.torture import fits, kinds, mutations, projects
from tests.torture.kinds import Kind, Place

KINDS: dict[str, Kind] = {
    "parameters": kinds.parameters,
    "artifacts": kinds.artifacts,
    "device.json": kinds.device,
    "stored costs": kinds.costs,
    "stored options": kinds.options,
    "stored plans": fits.plans,
    "stores of fit": fits.stores,
    "checkpoints": kinds.checkpoints,
    "saved steps": fits.saved_steps,
    "sources": kinds.sources,
    "budgets": kinds.budgets,
    "arguments of fit": fits.arguments,
    "kills of stages": kinds.kills,
    "kills of fit": fits.kills,
    "interrupts of stages": kinds.interrupts,
    "interrupts of fit": fits.interrupts,
    "full disks": kinds.full_disks,
    "at once": kinds.at_once,
}


def main() -> int:
    """Torture, and print tried and passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=10**9, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", action="append", choices=list(KINDS), help="this kind; may be given several times")
    parser.add_argument("--case-seed", type=int, default=None, help="one case, again")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    chosen = asked.only or list(KINDS)
    console = Console(soft_wrap=True)
    console.print(f"seed {seed}", highlight=False)
    base = Path(tempfile.mkdtemp(prefix="stowage-torture-"))
    mutations.CANARY.unlink(missing_ok=True)
    try:
        place = _place(base, console)
        return _torture(place, chosen, seed, asked, console)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _place(base: Path, console: Console) -> Place:
    import stowage.flows.api.fit  # noqa: F401 - before the first fork
    from stowage.stages.ir.table import write_record
    from tests.devices import made_up_cpu

    write_record(base / "device.json", made_up_cpu())
    began = time.monotonic()
    projects.import_what_stages_import(base / "first", projects.PARAMETERS, base / "device.json")
    made = [
        projects.make(base / name, content, base / "device.json")
        for name, content in (
            ("plain", projects.PARAMETERS),
            ("own", projects.own_model()),
            ("offloading", projects.offloading()),
        )
    ]
    console.print(f"three projects planned and trained undisturbed in {time.monotonic() - began:.0f} s")
    return Place(base, *made)


def _torture(place: Place, chosen: list[str], seed: int, asked: argparse.Namespace, console: Console) -> int:
    until = time.monotonic() + 60 * asked.minutes
    seeds = random.Random(seed)
    tried, passed, refused = (dict.fromkeys(chosen, 0) for _ in range(3))
    try:
        while time.monotonic() < until and min(tried.values()) < asked.cases:
            for name in chosen:
                if tried[name] >= asked.cases or time.monotonic() >= until:
                    continue
                own = asked.case_seed if asked.case_seed is not None else seeds.randrange(1 << 48)
                case = KINDS[name](place, random.Random(own))
                tried[name] += 1
                passed[name] += not case.fault
                refused[name] += bool(case.ended and case.ended.code)
                if case.fault or asked.case_seed is not None:
                    said = case.ended.said[-1500:] if case.ended else ""
                    print(f"{name}, case seed {own}: {case.what}\n  {case.fault or 'passed'}\n  {said}", flush=True)
                _forget(place)
            if asked.case_seed is not None:
                break
    finally:
        _show(console, seed, chosen, tried, passed, refused)
    return 0 if tried == passed else 1


def _show(console: Console, seed: int, chosen: list[str], *counts: dict[str, int]) -> None:
    table = Table("kind", "tried", "passed", "ended in a sentence", title=f"seed {seed}")
    for name in chosen:
        table.add_row(name, *(str(count[name]) for count in counts))
    console.print(table)


def _forget(place: Place) -> None:
    for path in place.placement.glob(f"case{place.count}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    sys.exit(main())
