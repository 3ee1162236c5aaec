"""A lossy plan, a colleague's or an old one, is refused where nobody has allowed it, and says what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stowage.flows.planning.by_rules import blank_summary
from stowage.stages.codegen.header import header
from stowage.stages.ir.errors import ParameterError, PlanMismatchError
from stowage.stages.ir.lossy import GradientError, Lossy
from stowage.stages.ir.trace import TraceMeta
from stowage.stages.ir.variant import VariantName
from stowage.stages.report.facts import gather, headline
from stowage.stages.rewrite.lossy import Classes
from stowage.stages.rewrite.lossy import saved as saved_module
from stowage.stages.settings import Settings, parse_settings
from stowage.stages.trace import trace_step
from stowage.stages.train.plan_files import check_errors, check_leave
from tests.zoo import ZOO

KEPT = ("int8: h.*.mlp addmm", "bf16: h.* add")
LOSSY = replace(blank_summary(), plan_hash="abc", exact=False, lossy=KEPT, gradient_error=0.0042)


def settings(**lossy: object) -> Settings:
    return parse_settings({"trace": {"model": {"architecture": "gpt2"}}, "lossy": lossy})


def test_a_lossy_plan_needs_leave() -> None:
    with pytest.raises(PlanMismatchError, match=r"Plan abc keeps values for backward in bf16, int8, which changes"):
        check_leave(LOSSY, settings())
    with pytest.raises(PlanMismatchError, match=r"in int8, which changes gradients, and lossy.kinds do not allow it"):
        check_leave(LOSSY, settings(kinds=["bf16"]))
    check_leave(LOSSY, settings(kinds=["bf16", "int8"]))
    check_leave(LOSSY, settings(kinds="all"))


def test_a_plan_must_be_within_the_limit_of_today() -> None:
    check_leave(LOSSY, settings(kinds="all", max_gradient_error=0.0042))
    with pytest.raises(PlanMismatchError, match=r"Plan abc may change gradients by 0.420%, and .* allows 0.400%"):
        check_leave(LOSSY, settings(kinds="all", max_gradient_error=0.004))


def test_an_exact_plan_needs_none() -> None:
    check_leave(replace(blank_summary(), lossy=("relu1bit: h relu alone",)), settings())


ALTERED = replace(LOSSY, exact=True, lossy=(), gradient_error=0.0, variant="packed[0-2]+int8[0,3]+relu1bit[1]")
"""Says of itself that it is exact, and the step that is made from its name is not."""


def test_the_name_of_the_variant_counts_whatever_the_summary_says() -> None:
    with pytest.raises(PlanMismatchError, match=r"Plan abc keeps values for backward in int8, relu1bit, which changes"):
        check_leave(ALTERED, settings())
    with pytest.raises(PlanMismatchError, match=r"in int8, which changes gradients, and lossy.kinds do not allow it"):
        check_leave(ALTERED, settings(kinds=["bf16", "relu1bit"]))
    with pytest.raises(PlanMismatchError, match=r"in top10, which changes gradients"):
        check_leave(replace(ALTERED, variant="top10_frozen[0]+long_lived"), settings(kinds=["bf16"]))
    check_leave(ALTERED, settings(kinds=["int8", "relu1bit"]))
    for name in ("plain", "packed[0-2]", "packed+long_lived", "relu1bit[0-3]"):
        check_leave(replace(ALTERED, variant=name), settings())


def test_what_was_measured_counts_whatever_the_summary_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_module, "SMALLEST", 64)
    model, batch, loss = ZOO["gpt2"]()
    trace = trace_step(model, batch, loss=loss)
    (kind, name), ((site, _), *_) = next(iter(Classes(trace).members(["int8"]).items()))
    plan = replace(LOSSY, variant=VariantName.at({kind: [site]}).text)
    measured = [GradientError(kind, name, 0.0042**2), GradientError("bf16", name, 0.5)]
    check_errors(plan, trace, measured)
    with pytest.raises(PlanMismatchError, match=r"Plan abc states .* by 0.100% at most, .* measured .* is 0.420%"):
        check_errors(replace(plan, gradient_error=0.001), trace, measured)
    with pytest.raises(PlanMismatchError, match="measured"):
        check_errors(plan, trace, [])
    check_errors(replace(plan, variant="packed", gradient_error=0.0), trace, [])


def test_leave_in_params_yaml() -> None:
    assert settings().lossy.leave is None
    assert settings(kinds=["int8"], max_gradient_error=0.02).lossy.leave == Lossy(["int8"], 0.02)
    with pytest.raises(ParameterError, match="int7"):
        settings(kinds=["int7"])


def test_the_head_of_a_step_and_the_report_list_what_is_kept() -> None:
    meta = TraceMeta("", "gpt2", "cpu", "2", 0, "", 1)
    text = header(meta, LOSSY)
    assert "- int8: h.*.mlp addmm\n- bf16: h.* add\n" in text
    assert "by 0.420% at most" in text
    assert "fewer bits" not in header(meta, blank_summary())
    rows = [row for row in headline(LOSSY, gather([])) if row.note in ("h.* add",) or "h.*.mlp addmm" in row.note]
    assert [row.plan for row in rows] == ["int8", "bf16"]
    assert "fewer bits" in repr(LOSSY)
