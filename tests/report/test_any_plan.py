"""Every report of every plan can be made, whatever moves and however little there is."""

import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.report.chrome_trace import chrome_trace
from teraplan.report.decisions import decisions, fold
from teraplan.report.drawing import draw_plan
from teraplan.report.plan_changes import all_layers, changes_text, plan_changes
from teraplan.report.plan_text import plan_details, plan_json, plan_screen
from teraplan.report.summary import plan_banner
from teraplan.simulation.simulate import simulate
from teraplan.units import MIB
from teraplan.values.hardware import Budgets, Tier
from teraplan.values.plan import Plan
from tests.report.example_plan import make_plan

EXAMPLE = make_plan()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """The example with some of its migrations, other tiers, layers, and budgets."""
    chosen = [m for m in EXAMPLE.migrations if draw(st.booleans())]
    places = st.sampled_from([(Tier.HOST, 0), (Tier.STORAGE, 0), (Tier.STORAGE, 5 * MIB)])
    migrations = tuple(
        replace(m, tier=tier, host_bytes=host_bytes)
        for m in chosen
        for tier, host_bytes in [draw(places)]
    )
    layers = st.sampled_from(["", "a", "a.0", "a.1.b", "a.2.b", "x" * 200])
    tensors = tuple(replace(tensor, layer=draw(layers)) for tensor in EXAMPLE.trace.tensors)
    trace = replace(EXAMPLE.trace, tensors=tensors)
    simulation = simulate(trace, EXAMPLE.hardware, migrations)
    budget = draw(st.sampled_from([0, 1, 2**31, 2**45]))
    return replace(
        EXAMPLE,
        trace=trace,
        migrations=migrations,
        budgets=Budgets(device_bytes=budget, host_bytes=budget, storage_bytes=budget),
        prediction=simulation.prediction,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_report_can_be_made(plan: Plan) -> None:
    assert len(plan_screen(plan).splitlines()) <= 45
    assert len(plan_banner(plan).splitlines()) <= 8
    assert len(plan_details(plan).splitlines()) > len(plan.trace.tensors)
    json.dumps(plan_json(plan, everything=True))
    json.dumps(
        chrome_trace(plan, [draw_plan(plan, simulate(plan.trace, plan.hardware, plan.migrations))])
    )
    assert changes_text(plan_changes(EXAMPLE, plan), all_layers(EXAMPLE, plan))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_folding_keeps_every_decision(plan: Plan) -> None:
    rows = fold(plan)
    singles = decisions(plan)
    assert sorted(i for row in rows for i in row.tensor_ids) == [d.tensor_id for d in singles]
    assert sum(row.stall_ns for row in rows) == sum(plan.prediction.stall_ns.values())
    moved = sum(row.nbytes for row in rows if row.tier is not None)
    assert moved == sum(plan.prediction.back_bytes.values())
