"""Every text that a person reads, as a whole, and the facts in it that must hold."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from teraplan.checker.check_plan import check_plan
from teraplan.report.check_text import valid_text, violations_text
from teraplan.report.machine_text import facts_json, facts_text, links_json, links_text
from teraplan.report.memory_chart import memory_chart, sampled_intervals
from teraplan.report.plan_changes import all_layers, changes_json, changes_text, plan_changes
from teraplan.report.plan_text import plan_details, plan_json, plan_screen
from teraplan.report.run_text import runs_text
from teraplan.report.summary import plan_banner, top_stalls
from teraplan.report.table import to_ascii
from teraplan.units import GIB
from teraplan.values.hardware import Budgets, Tier
from teraplan.values.plan import Plan
from teraplan.values.run_record import TRAINING_STATE, StallRecord
from teraplan.values.step_trace import StepTrace
from tests.report.example_plan import DISK, LINK, make_other_plan, make_plan, make_run
from tests.report.facts import Fact
from tests.report.golden import assert_golden


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


def without_migrations(plan: Plan) -> Plan:
    prediction = replace(
        plan.prediction,
        step_ns=plan.prediction.ideal_ns,
        device_peak_bytes=plan.prediction.unlimited_peak_bytes,
        host_peak_bytes=0,
        storage_peak_bytes=0,
        out_bytes={},
        back_bytes={},
        stall_ns={},
    )
    return replace(plan, migrations=(), prediction=prediction)


def many_rows(plan: Plan) -> Plan:
    """As many different decisions as there are tensors."""
    tensors = tuple(
        replace(tensor, layer=f"layer_{'abcdefghijklmnopqrstuvwxyz'[index]}")
        for index, tensor in enumerate(plan.trace.tensors)
    )
    return replace(plan, trace=replace(plan.trace, tensors=tensors))


def test_the_example_is_a_valid_plan(plan: Plan) -> None:
    assert check_plan(plan) == ()
    assert check_plan(make_other_plan()) == ()


def test_screen(plan: Plan) -> None:
    assert_golden("show.txt", plan_screen(plan))


def test_screen_in_ascii(plan: Plan) -> None:
    text = to_ascii(plan_screen(plan))
    assert text.isascii()
    assert "?" not in text


def test_screen_says_what_of_the_host_budget_is_for_staging(plan: Plan) -> None:
    staged = replace(plan, hardware=replace(plan.hardware, staging_bytes=256 << 20))
    (line,) = set(plan_screen(staged).splitlines()) - set(plan_screen(plan).splitlines())
    assert line.split() == ["of", "it", "for", "staging", "256.00", "MiB"]


def test_steps_as_they_ran_in_words(plan: Plan) -> None:
    run = replace(make_run(plan), stalls=())
    assert runs_text(plan, [run]).startswith("As it ran in step 7\n")
    text = runs_text(plan, [run, replace(run, step=9)])
    assert text.startswith("As it ran in 2 of the steps 7 to 9\n")
    assert "\nWaits" not in text
    stall = StallRecord(site=3, tensor=TRAINING_STATE, start_ns=0, duration_ns=5_000_000)
    text = runs_text(plan, [run, replace(run, step=8, stalls=(stall,))])
    assert text.endswith("\nWaits  2.50 ms training state")


def test_details(plan: Plan) -> None:
    text = plan_details(plan)
    assert_golden("show_all.txt", text)
    assert all(tensor.name in text for tensor in plan.trace.tensors)


@pytest.mark.parametrize("make", [make_plan, lambda: many_rows(make_plan())])
def test_screen_fits_on_a_screen(make: Callable[[], Plan]) -> None:
    lines = plan_screen(make()).splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines) <= 130


def test_screen_says_what_it_leaves_out(plan: Plan) -> None:
    assert "… 10 more rows, 1.06 GiB; --all shows every tensor" in plan_screen(many_rows(plan))


def test_screen_of_a_plan_that_moves_nothing(plan: Plan) -> None:
    text = plan_screen(without_migrations(plan))
    assert "nothing moves, all 25 tensors of the step stay on Test GPU" in text
    assert "all of it computation" in text
    assert "Waits" not in text


def test_screen_of_an_empty_step(plan: Plan) -> None:
    trace = StepTrace(fingerprint=plan.trace.fingerprint, state_bytes=0, sites=(), tensors=())
    prediction = replace(without_migrations(plan).prediction, step_ns=0, ideal_ns=0)
    text = plan_screen(replace(plan, trace=trace, migrations=(), prediction=prediction))
    assert "(the trace has no sites)" in text


def test_banner(plan: Plan) -> None:
    text = plan_banner(plan)
    assert_golden("banner.txt", text)
    assert len(text.splitlines()) <= 8


def test_banner_of_a_plan_that_moves_nothing(plan: Plan) -> None:
    assert_golden("banner_nothing_moves.txt", plan_banner(without_migrations(plan)))


def test_longest_waits_come_first_and_the_rest_is_summed(plan: Plan) -> None:
    stalls = {1: 10, 3: 40, 5: 30, 7: 20, 9: 5}
    words = top_stalls(replace(plan, prediction=replace(plan.prediction, stall_ns=stalls)))
    assert words == [
        "40 ns blocks.1.mlp gelu",
        "30 ns blocks.2.mlp gelu",
        "20 ns blocks.3.mlp gelu",
        "15 ns for 2 more",
    ]


def test_chart_marks_a_budget_under_the_peak_and_none_above(plan: Plan) -> None:
    assert sum("---" in line for line in memory_chart(plan)) == 1
    roomy = Budgets(device_bytes=9 * GIB, host_bytes=0, storage_bytes=0)
    assert not any("---" in line for line in memory_chart(replace(plan, budgets=roomy)))


def test_chart_columns_cover_every_interval_once_or_more(plan: Plan) -> None:
    for width in (1, 7, 72, 300):
        intervals = sampled_intervals(plan.trace, width)
        seen = {index for low, high in intervals for index in range(low, high)}
        assert len(intervals) == width
        assert seen == set(range(len(plan.trace.sites)))


def test_json_has_the_numbers_of_the_plan(plan: Plan) -> None:
    facts = plan_json(plan, everything=True)
    assert facts["num_migrations"] == 13
    assert facts["budgets"] == {
        "device_bytes": int(2.75 * GIB),
        "host_bytes": 2 * GIB,
        "storage_bytes": 64 * GIB,
    }
    migrations = facts["migrations"]
    assert isinstance(migrations, list)
    assert len(migrations) == 13
    assert "migrations" not in plan_json(plan)


def test_changes(plan: Plan) -> None:
    other = make_other_plan()
    assert_golden("diff.txt", changes_text(plan_changes(plan, other), all_layers(plan, other)))


def test_no_changes(plan: Plan) -> None:
    changes = plan_changes(plan, plan)
    assert not changes.any
    assert changes_text(changes, ()) == "The plans are equal."
    assert changes_json(changes) == {"equal": True, "facts": [], "decisions": []}


def test_changes_of_tier_sites_copies_and_hardware(plan: Plan) -> None:
    first, second, third, *rest = plan.migrations
    changed = replace(
        plan,
        migrations=(
            replace(first, tier=Tier.STORAGE),
            replace(second, gone=second.gone + 1),
            replace(third, clean=True),
            *rest,
        ),
        hardware=replace(plan.hardware, storage_link=LINK),
    )
    changes = plan_changes(plan, changed)
    found = {
        change.what: [tensor.name for tensor in change.tensors] for change in changes.decisions
    }
    assert found == {
        "host → storage": ["g0.c0/sdpa_0"],
        "other sites": ["g0.c0/gelu_1"],
        "no longer written": ["g0.c1/sdpa_0"],
    }
    assert [change.name for change in changes.facts] == ["machine"]


def test_valid_plan(plan: Plan) -> None:
    assert_golden("check_valid.txt", valid_text(plan))


def test_violations_name_tensors_and_sites(plan: Plan) -> None:
    migrations = list(plan.migrations)
    migrations[0] = replace(migrations[0], needed=migrations[0].needed + 1)
    broken = replace(plan, migrations=tuple(migrations))
    assert_golden("check_late.txt", violations_text(broken, check_plan(broken)))


def test_violation_of_the_budget_names_the_site(plan: Plan) -> None:
    budgets = replace(plan.budgets, device_bytes=GIB)
    tight = replace(plan, budgets=budgets)
    text = violations_text(tight, check_plan(tight))
    assert "1.56 GiB over the limit of 1.00 GiB" in text
    assert "site 36 (enter g0 call 11, backward)" in text


FACTS = (
    Fact(name="device", value="CPU", status="ok"),
    Fact(name="locked memory", value="8.00 MiB", status="warning", advice="ulimit -l unlimited"),
    Fact(name="GPUDirect Storage", value="absent", status="note"),
)


def test_facts() -> None:
    assert_golden("doctor.txt", facts_text(FACTS))
    assert facts_json(FACTS)["num_warnings"] == 1
    assert facts_text(FACTS[:1]).endswith("No warnings.")


def test_links() -> None:
    links = [("host", LINK), ("storage", DISK)]
    assert_golden("probe.txt", links_text(links))
    waiting = replace(DISK, out_while_back_bytes_per_s=1)
    assert re.search(r"6.80 GB/s +waits for reads +3.60 GB/s", links_text([("storage", waiting)]))
    storage = links_json(links)["storage"]
    assert isinstance(storage, dict)
    assert storage["latency_ns"] == 90_000
