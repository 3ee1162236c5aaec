"""What the times of a run's iterations are summed up to."""

from __future__ import annotations

import math

import pytest

from stowage.stages.ir.run import StepRecord
from stowage.stages.train.comparison import median_time_s

NAN = math.nan


def record(iteration: int, time_s: float, peak_bytes: int) -> StepRecord:
    return StepRecord(iteration, 0.0, NAN, 0.0, time_s, NAN, peak_bytes)


@pytest.mark.parametrize(
    ("times", "median_s"),
    [
        ([(9.0, 5), (9.0, -1), (9.0, -1), (8.0, 5), (1.0, -1), (3.0, -1), (8.0, 5), (2.0, -1), (1.5, -1)], 1.75),
        ([(9.0, 5), (9.0, 5), (9.0, 5), (4.0, 5), (5.0, 5), (6.0, 5)], 5.0),
        ([(9.0, -1), (9.0, -1), (9.0, -1), (4.0, -1), (5.0, -1), (6.0, -1)], 5.0),
        ([(9.0, 5), (4.0, 5), (5.0, -1)], 5.0),
        ([(9.0, 5)], 9.0),
    ],
    ids=["under the profiler every third", "every one", "none", "few", "one iteration"],
)
def test_iterations_under_the_profiler_are_not_timed_where_others_are(
    times: list[tuple[float, int]], median_s: float
) -> None:
    assert median_time_s([record(i, *one) for i, one in enumerate(times)]) == median_s


def test_no_iteration_has_no_median() -> None:
    assert math.isnan(median_time_s([]))
