"""What the comparison of launch plans says of its rows; its figures need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("elman_e88")


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        sys.modules.pop("matrix_plans", None)
        import matrix_plans
    return matrix_plans


def row(plan: str, *times: float) -> dict[str, object]:
    checked = {"passed": bool(times), "worst": 0.2 if times else 7.0, "output_error": 1.7e-3, "gradient_error": 3e-3}
    named = dict(zip(("forward", "backward", "fused_forward", "fused_backward"), times, strict=False))
    return {"shape": (32, 512, 32, 16), "target": (60, 140), "plan": plan, **checked, **named}


def test_the_fastest_of_each_direction_is_named_and_a_wrong_plan_never_is(plans: ModuleType) -> None:
    rows = [row("default", 81, 222, 101, 270), row("paired", 62, 230, 80, 280), row("half_paired")]
    assert plans.best(rows) == {"B=32 T=512 H=32 n=16": {"forward": "paired", "backward": "default"}}
    assert plans.best([row("half_paired")]) == {}


def test_the_table_has_a_line_for_each_plan_and_a_wrong_plan_has_no_time(plans: ModuleType) -> None:
    lines = plans.table([row("default", 81.1, 222.4, 101, 270), row("half_paired")])
    assert len(lines) == 4
    assert "target" in lines[1]
    assert lines[2].split()[:5] == ["default", "81.1", "222.4", "101.0", "270.0"]
    assert lines[3].split()[1:5] == ["-"] * 4
    assert lines[3].endswith("WRONG")


def test_plans_are_chosen_by_name_and_each_has_its_modules(plans: ModuleType) -> None:
    assert plans.chosen("default, paired") == ["default", "paired"]
    assert plans.chosen("all") == list(plans.PLANS)
    with pytest.raises(SystemExit, match="no launch plan 'fast'"):
        plans.chosen("default,fast")
    made = plans.modules(["default", "paired"], [16, 32])
    assert len({e.name for e in made}) == len(made) == 8
