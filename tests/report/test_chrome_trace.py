"""Timelines against a schema of our own, stricter than what viewers accept."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraplan.report.chrome_trace import by_link, chrome_trace, lanes
from teraplan.report.drawing import Drawing, draw_plan, draw_run
from teraplan.simulation.simulate import simulate
from teraplan.values.hardware import Tier
from teraplan.values.plan import Plan
from teraplan.values.run_record import Direction, TransferRecord
from tests.report.example_plan import make_plan, make_run

FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_event(event: dict[str, object]) -> None:
    """Fails unless `event` is exactly what the Trace Event Format has for its phase."""
    phase = event["ph"]
    assert isinstance(phase, str)
    assert set(event) == FIELDS[phase]
    assert isinstance(event["name"], str)
    assert event["name"]
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    args = event["args"]
    assert isinstance(args, dict)
    for field in ("ts", "dur"):
        if field in event:
            time = event[field]
            assert type(time) is float
            assert math.isfinite(time)
            assert time >= 0
    if phase == "M":
        key, kind = METADATA[event["name"]]
        assert list(args) == [key]
        assert type(args[key]) is kind
    if phase == "C":
        assert args
        assert all(type(value) is int and value >= 0 for value in args.values())
    if phase == "X":
        assert isinstance(event["cat"], str)
        assert event["cat"]
        assert all(type(value) in (str, int, float) for value in args.values())


def check_tracks(events: list[dict[str, object]]) -> None:
    """Fails if slices of a track overlap or a track has no name."""
    tracks: dict[tuple[object, object], list[tuple[float, float]]] = {}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            start, duration = event["ts"], event["dur"]
            assert isinstance(start, float)
            assert isinstance(duration, float)
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + duration))
    assert set(tracks) <= named
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-6


def events_of(plan: Plan, *drawings: Drawing) -> list[dict[str, object]]:
    trace = json.loads(json.dumps(chrome_trace(plan, drawings)))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[dict[str, object]] = trace["traceEvents"]
    for event in events:
        check_event(event)
    check_tracks(events)
    return events


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@pytest.fixture(scope="module")
def planned(plan: Plan) -> Drawing:
    return draw_plan(plan, simulate(plan.trace, plan.hardware, plan.migrations))


def test_every_event_is_valid_and_nothing_is_missing(plan: Plan, planned: Drawing) -> None:
    events = events_of(plan, planned)
    slices = [event for event in events if event["ph"] == "X"]
    categories = [event["cat"] for event in slices]
    assert categories.count("forward") == 12
    assert categories.count("backward") == 12
    assert categories.count("out") == len(plan.migrations)
    assert categories.count("back") == len(plan.migrations)
    assert categories.count("wait") == len(planned.stalls) > 0
    names = {json.dumps(event["args"]) for event in events if event["name"] == "thread_name"}
    for track in ("computation", "waits", "host out", "host back", "storage out", "storage back"):
        assert json.dumps({"name": track}) in names


def test_planned_and_actual_are_two_processes(plan: Plan, planned: Drawing) -> None:
    events = events_of(plan, planned, draw_run(plan, make_run(plan)))
    names = [event["args"] for event in events if event["name"] == "process_name"]
    assert names == [{"name": "planned"}, {"name": "actual, step 7"}]
    assert {event["pid"] for event in events} == {1, 2}


def test_computation_fills_the_step(plan: Plan, planned: Drawing) -> None:
    calls = planned.calls
    assert calls[0].start_ns == 0
    assert calls[-1].end_ns == planned.duration_ns
    pairs = itertools.pairwise(calls)
    assert all(left.end_ns == right.start_ns for left, right in pairs)
    assert [call.backward for call in calls] == [False] * 12 + [True] * 12


def test_memory_counter_has_the_peak_of_the_plan(plan: Plan, planned: Drawing) -> None:
    totals = []
    for event in events_of(plan, planned):
        if event["name"] == "device memory (bytes)":
            args = event["args"]
            assert isinstance(args, dict)
            totals.append(sum(args.values()))
    assert max(totals) == plan.prediction.device_peak_bytes
    assert max(planned.device_bytes) == plan.prediction.device_peak_bytes


def test_a_plan_that_moves_nothing(plan: Plan) -> None:
    still = replace(plan, migrations=())
    drawing = draw_plan(still, simulate(still.trace, still.hardware, ()))
    categories = {event.get("cat") for event in events_of(still, drawing)}
    assert categories == {None, "forward", "backward"}


def transfer(start_ns: int, duration_ns: int, store: str = "") -> TransferRecord:
    return TransferRecord(
        tensor=f"t{start_ns}",
        nbytes=1,
        direction=Direction.OUT,
        tier=Tier.STORAGE,
        store=store,
        start_ns=start_ns,
        end_ns=start_ns + duration_ns,
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_lanes_hold_every_transfer_without_overlap(spans: list[tuple[int, int]]) -> None:
    transfers = [transfer(start, duration) for start, duration in spans]
    rows = lanes(transfers)
    assert sum(len(row) for row in rows) == len(transfers)
    for row in rows:
        for left, right in itertools.pairwise(row):
            assert left.end_ns <= right.start_ns
    busiest = max((sum(s <= t < s + d for s, d in spans) for t in range(70)), default=0)
    num_instant = sum(not duration for _, duration in spans)
    assert busiest <= len(rows) <= busiest + num_instant


def test_each_store_has_its_own_track() -> None:
    found = by_link([transfer(0, 5, "/a"), transfer(0, 5, "/b"), transfer(5, 5, "/a")])
    assert {name: len(rows) for name, rows in found.items()} == {
        "storage /a out": 2,
        "storage /b out": 1,
    }
