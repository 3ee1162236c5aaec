"""The benchmark of planning time against depth: rows, ratios and the picture."""

from __future__ import annotations

import io

import matplotlib.image
import pytest

from stowage.flows.benchmarks.scaling.growth import GrowthRow, picture, plan_rows, ratios
from stowage.flows.benchmarks.scaling.growth_figure import growth_figure


def row(layers: int, stage: str, seconds: float, method: str = "rockmate") -> GrowthRow:
    return GrowthRow("llama", method, layers, stage, seconds, 10 * layers, 2 * layers, 0.1)


ROWS = [
    *(row(n, "solve", s) for n, s in ((8, 1.0), (16, 2.5), (32, 6.0))),
    *(row(n, "total", s) for n, s in ((8, 2.0), (16, 4.0), (32, 9.0))),
    row(8, "total", 3.0, "offmate"),
    row(32, "total", 3.6, "offmate"),
]


def test_ratios_are_of_the_deepest_over_the_shallowest() -> None:
    found = ratios(ROWS)
    assert found["llama", "rockmate"] == {"solve": 6.0, "total": 4.5}
    assert found["llama", "offmate"] == pytest.approx({"total": 1.2})


def test_the_picture_has_a_panel_a_case_and_a_line_a_stage() -> None:
    series = {"solve": [(8, 1.0), (32, 6.0)], "total": [(8, 2.0), (32, 9.0)]}
    figure = growth_figure({"one": series, "two": series})
    assert [axes.get_title() for axes in figure.axes] == ["one", "two"]
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines == {
            "solve": [[8, 1.0], [32, 6.0]],
            "total": [[8, 2.0], [32, 9.0]],
            "linear": [[8, 2.0], [32, 8.0]],
        }
    assert picture(ROWS) == picture(ROWS)
    assert matplotlib.image.imread(io.BytesIO(picture(ROWS))).shape[1] == 1500


@pytest.mark.long
def test_a_plan_is_timed_stage_by_stage() -> None:
    rows = plan_rows("gpt2", "rockmate", 1)
    assert [r.stage for r in rows] == ["trace", "profile", "partition", "options", "solve", "codegen", "total"]
    assert rows[-1].seconds == pytest.approx(sum(r.seconds for r in rows[:-1]))
    assert all(r.seconds >= 0 for r in rows)
    assert rows[0].calls > 100


def test_a_stage_that_the_shallowest_did_not_reach_is_left_out() -> None:
    reached = [r for r in ROWS if r.layers == max(r.layers for r in ROWS)]
    least = min(ROWS, key=lambda r: r.layers)
    ((_, by_stage),) = ratios([least, *reached]).items()
    assert list(by_stage) == [least.stage]
