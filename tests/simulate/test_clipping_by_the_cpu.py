"""The referee on an update by the CPU that clips its gradient by a scale that serves other updates too."""

from __future__ import annotations

import pytest

from stowage.stages.ir.errors import IllegalPlanError
from stowage.stages.ir.machine import Link, TierState
from stowage.stages.ir.step import Step
from stowage.stages.simulate.lower_tier import ReplayedTier
from stowage.stages.simulate.plan import Outcome, replay_plan
from tests.simulate.small_plans import GRADIENT, KEEP, LOSS, NODES, STORAGES, WEIGHT, X, Y, node, storage

OTHER, BIAS, SCALE = 5, 6, 7
CLIPPED = [
    *STORAGES,
    storage(OTHER, 100, name="other gradient"),
    storage(BIAS, 100, "parameter", "bias"),
    storage(SCALE, 4, name="scale"),
]
PROGRAM = [
    *NODES[:3],
    node(3, [X, Y, BIAS], [GRADIENT, OTHER], time_s=8.0, phase="backward"),
    node(4, [LOSS], [SCALE], time_s=1.0, phase="update", name="clip"),
    node(5, [GRADIENT, WEIGHT, SCALE], [], time_s=16.0, phase="update", mutates=(WEIGHT,), once=True),
    node(6, [OTHER, BIAS, SCALE], [], time_s=2.0, phase="update", mutates=(BIAS,), once=True, name="update bias"),
]
LINK = Link(1000.0, 1000.0)
OFFLOADED = frozenset({WEIGHT})
NAMES = {"w": WEIGHT, "x": X, "y": Y, "g": GRADIENT, "o": OTHER, "s": SCALE, "b": BIAS}
VERBS = {"up": "reload", "down": "offload", "wait": "wait", "free": "free"}

LEGAL = "wait:w up:w wait:w 0 free:w 1 2 3 free:x free:y down:g wait:g free:g 4 down:s wait:s update:w 6 free:o free:s"


def replay(text: str, host_room_bytes: int | None = None) -> Outcome:
    rows = []
    for word in text.split():
        verb, _, name = word.partition(":")
        if verb == "update":
            rows.append(Step(5, NAMES[name], "row", "update"))
        else:
            rows.append(Step(int(verb), -1, "row") if verb.isdigit() else Step(-1, NAMES[name], "row", VERBS[verb]))  # type: ignore[arg-type]
    return replay_plan(
        CLIPPED,
        PROGRAM,
        rows,
        keep=KEEP,
        start=TierState(offloaded=OFFLOADED, updating=OFFLOADED),
        tier=ReplayedTier(LINK, cpu_update_s={5: 8.0}, host_room_bytes=host_room_bytes),
    )


def test_by_hand() -> None:
    """The scale goes down after the gradient; the update lasts into the next iteration, which waits for it."""
    found = replay(LEGAL)
    computing, copies = 1.0 + 2.0 + 4.0 + 8.0 + 1.0 + 2.0, 1.0 + 1.0 + 0.004
    assert found.time_s == pytest.approx(computing + copies + 8.0 - 2.0), "the update of the bias is beside it"
    assert found.lower_tier_bytes == 1000 + 1000 + 4, "the weight, its gradient, which waits in the host, and the scale"
    assert found.peak_bytes == 100 + 1 + 10 + 20 + 1000 + 100
    replay(LEGAL, host_room_bytes=2004)
    with pytest.raises(IllegalPlanError, match="in the host needs 2004 bytes, and 2003"):
        replay(LEGAL, host_room_bytes=2003)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("down:s wait:s update:w", "update:w", "needs scale, which has no copy in the lower tier"),
        ("down:s wait:s update:w", "down:s update:w wait:s", "needs scale, which has no copy in the lower tier"),
        ("4 down:s wait:s update:w", "update:w 4", "needs scale, which has no copy in the lower tier"),
        (
            "update:w 6 free:o free:s",
            "update:w 6 free:o down:s wait:s free:s",
            "an update by the CPU is still reading it",
        ),
        ("update:w 6", "update:w up:g wait:g free:g 6", "gradient: it has no copy in the lower tier"),
        ("wait:w up:w wait:w 0", "up:w wait:w 0", "weight: it has no copy in the lower tier"),
        ("wait:w up:w wait:w 0", "wait:w up:w 0", "reads weight, not in memory"),
    ],
)
def test_each_rule(old: str, new: str, sentence: str) -> None:
    assert old in LEGAL
    with pytest.raises(IllegalPlanError, match=sentence):
        replay(LEGAL.replace(old, new))
