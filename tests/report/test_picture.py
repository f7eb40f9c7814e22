"""Pictures are looked at by people; here: they are made, and have the right words in them."""

from dataclasses import replace
from pathlib import Path

import pytest

from teraplan.errors import FileFormatError
from teraplan.report.drawing import Drawing, draw_plan, draw_run
from teraplan.simulation.simulate import simulate
from teraplan.values.plan import Plan
from tests.report.example_plan import make_plan, make_run

pytest.importorskip("matplotlib")
from teraplan.report.picture import save_picture, step_figure
from teraplan.report.picture_links import link_rows


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@pytest.fixture(scope="module")
def planned(plan: Plan) -> Drawing:
    return draw_plan(plan, simulate(plan.trace, plan.hardware, plan.migrations))


def words(plan: Plan, planned: Drawing, actual: Drawing | None) -> list[str]:
    figure = step_figure(plan, planned, actual)
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [label.get_text() for label in axes.get_yticklabels()]
    return found


@pytest.mark.parametrize(
    ("file_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_formats(
    plan: Plan, planned: Drawing, tmp_path: Path, file_format: str, start: bytes
) -> None:
    path = tmp_path / "picture"
    save_picture(plan, planned, None, path, file_format)
    assert path.read_bytes().startswith(start)


def test_words(plan: Plan, planned: Drawing) -> None:
    found = words(plan, planned, None)
    for text in (
        "Peak device memory 4.34 GiB → 2.56 GiB, budget 2.75 GiB",
        "4.34 GiB without the plan",
        "2.56 GiB with the plan",
        "2.75 GiB budget",
        "forward",
        "backward",
        "storage out",
        "host back",
    ):
        assert text in found


def test_a_run_is_drawn_beside_the_plan(plan: Plan, planned: Drawing) -> None:
    actual = draw_run(plan, make_run(plan))
    found = words(plan, planned, actual)
    assert "2.56 GiB actual, step 7" in found
    assert "storage out, planned" in found
    assert found.count("actual") == 5
    assert "waits 4.00 ms" in found


def test_rows_do_not_overlap(plan: Plan, planned: Drawing) -> None:
    rows = link_rows([planned, draw_run(plan, make_run(plan))])
    ends = [0.0, *(row.bottom + row.height for row in rows)]
    assert all(row.bottom >= end for row, end in zip(rows, ends, strict=False))
    assert [row.name for row in rows[:3]] == ["computation, planned", "actual", "host out, planned"]


def test_nothing_moves_and_the_budget_is_far_away(plan: Plan) -> None:
    roomy = replace(plan.budgets, device_bytes=100 * plan.budgets.device_bytes)
    still = replace(plan, migrations=(), budgets=roomy)
    drawing = draw_plan(still, simulate(still.trace, still.hardware, ()))
    found = words(still, drawing, None)
    assert "no waits" in found
    assert not any(text.endswith(" budget") for text in found)


def test_a_run_of_another_plan_is_refused(plan: Plan) -> None:
    run = replace(make_run(plan), managed_bytes=(0,))
    with pytest.raises(FileFormatError, match="step 7 has times of 96 sites and memory of 1"):
        draw_run(plan, run)
