"""Files come back as they were written, and hostile ones are refused with the field's name."""

import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teraplan.checker.check_plan import check_plan
from teraplan.checker.same_step import require_same_program
from teraplan.errors import FileFormatError
from teraplan.files import json_files
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.files.run_file import read_runs, write_runs
from teraplan.files.trace_file import read_trace, write_trace
from teraplan.planners import make_plan
from teraplan.simulation.memory_curve import device_curve, least_budget, peak
from teraplan.units import MIB
from teraplan.values.hardware import Hardware, Tier
from teraplan.values.run_record import Direction, RunRecord, StallRecord, TransferRecord
from teraplan.values.step_trace import StepTrace
from tests.planning.synthetic import budgets, gpt_trace, machine
from tests.planning.traces import machines, traces

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(trace=traces(), hardware=machines(), part=st.floats(0, 1))
def test_round_trips(tmp_path: Path, trace: StepTrace, hardware: Hardware, part: float) -> None:
    least, most = least_budget(trace).nbytes, peak(device_curve(trace))
    plan = make_plan(trace, hardware, budgets(least + int((most - least) * part)), "teraio")
    path = tmp_path / "file.json"
    write_trace(trace, path)
    assert read_trace(path) == trace
    write_plan(plan, path)
    assert read_plan(path) == plan
    first = path.read_bytes()
    write_plan(read_plan(path), path)
    assert path.read_bytes() == first
    record = RunRecord(
        step=3,
        duration_ns=5,
        device_peak_bytes=6,
        managed_peak_bytes=7,
        site_start_ns=(0, 1),
        managed_bytes=(2, 3),
        transfers=(
            TransferRecord(
                tensor="a",
                nbytes=1,
                direction=Direction.BACK,
                tier=Tier.HOST,
                store="",
                start_ns=1,
                end_ns=2,
            ),
        ),
        stalls=(StallRecord(site=1, tensor="a", start_ns=1, duration_ns=2),),
    )
    write_runs(path, plan, [record, record])
    assert read_runs(path) == (plan, (record, record))
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    trace = gpt_trace(1)
    plan = make_plan(trace, machine(), budgets(peak(device_curve(trace)) - 1))
    assert plan.migrations
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def set_at(path: str, value: object) -> Callable[[Any], None]:
    def change(data: Any) -> None:  # noqa: ANN401 - any JSON
        *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
        for part in parents:
            data = data[part]
        data[last] = value

    return change


CHANGES: list[tuple[str, object, str]] = [
    ("schema", "other", r'schema: is "other", expected "teraplan.plan"'),
    ("schema_version", 8, "schema_version: is 8, this teraplan reads 1, 2, 3, 4, 5, 6, 7"),
    ("surprise", 1, 'unknown field "surprise"'),
    ("policy", 3, "policy: is 3, expected a string"),
    ("budgets/device_bytes", -1, r"budgets.device_bytes: is -1, expected 0 to"),
    ("budgets/device_bytes", 1 << 80, "budgets.device_bytes: is .*, expected 0 to"),
    ("budgets/device_bytes", True, "budgets.device_bytes: is true, expected an integer"),
    ("budgets/device_bytes", "1", 'budgets.device_bytes: is "1", expected an integer'),
    ("migrations/0/tensor", "nobody", r'migrations\[0\].tensor: "nobody" is no tensor'),
    ("migrations/0/tier", "disk", r'migrations\[0\].tier: "disk" is not one of host, storage'),
    ("migrations/0/host_bytes", -1, r"migrations\[0\].host_bytes: is -1, expected 0 to \d+"),
    ("migrations/0/host_bytes", 1 << 40, r"migrations\[0\].host_bytes: is .*, expected 0 to \d+"),
    ("migrations/0/host_bytes", "1", r'migrations\[0\].host_bytes: is "1", expected an integer'),
    ("migrations/0/leave", 10**9, r"migrations\[0\].leave: is 1000000000, expected 0 to"),
    ("migrations/0/clean", 0, r"migrations\[0\].clean: is 0, expected true or false"),
    ("migrations", {}, "migrations: is an object of 0, expected a list"),
    ("hardware/storage_link/back_bytes_per_s", 0, "is 0 bytes per second; write null"),
    ("hardware/storage_link", 7, "hardware.storage_link: is 7, expected an object"),
    ("trace/sites/kind", "x", r'trace.sites.kind: has the letter "x"'),
    ("trace/sites/call", [1], r"trace.sites.call: has 1 items, expected \d+"),
    ("trace/sites/tensor/0", 10**6, r"trace.sites.tensor\[0\]: is 1000000, expected 0 to"),
    ("trace/sites/backward", "f", "trace.sites.backward: has 1 letters"),
    ("trace/graph_names", [], "trace.graph_names: is empty"),
    ("trace/tensors/0/windows", [], r"trace.tensors\[0\].windows: is empty"),
    ("trace/tensors/0/windows", [[4, 2]], r"trace.tensors\[0\].windows: are not ascending"),
    ("trace/tensors/0/windows/0", [1, 2, 3], r"windows\[0\]: has 3 items, expected 2"),
    ("trace/tensors/0/kind", "\x1b[31mX\nY", r'tensors\[0\].kind: "\\x1b\[31mX\\nY" is not one of'),
    ("trace/tensors/0/kind", "ghost", r'trace.tensors\[0\].kind: "ghost" is not one of'),
    ("trace/tensors/1/name", "g0.c0/norm_0", r'tensors\[1\].name: "g0.c0/norm_0" names two'),
    ("trace/tensors/0/changed_in", [9], r"changed_in\[0\]: is 9, expected 0 to"),
    ("trace/tensors/0/changed_in", [1, 0], "changed_in: are not ascending"),
    ("trace/tensors/0/nbytes", 1 << 60, "trace.tensors: add up to .* bytes with state, at most"),
    ("trace/sites/duration_ns/0", 1 << 51, "trace.sites.duration_ns: add up to .* ns, at most"),
    ("hardware/staging_bytes", 1 << 55, "staging_bytes: is .*, more than host_capacity_bytes, "),
    ("hardware/device_port", 3, "hardware.device_port: is 3, expected an object"),
    ("prediction/bound_ns", None, "prediction.bound_ns: is null, expected an integer"),
    ("trace/fingerprint/device", None, "trace.fingerprint.device: is null, expected a string"),
    ("prediction/stall_ns", {"nobody": 1}, 'prediction.stall_ns: "nobody" is no tensor'),
    ("prediction/out_bytes", {"disk": 1}, 'prediction.out_bytes: unknown field "disk"'),
]


@pytest.mark.parametrize(("path", "value", "message"), CHANGES)
def test_refuses_wrong_fields(plan_path: Path, path: str, value: object, message: str) -> None:
    data = json.loads(plan_path.read_text())
    set_at(path, value)(data)
    plan_path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=message):
        read_plan(plan_path)


def test_a_terminal_obeys_no_label(plan_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    set_at("trace/tensors/0/layer", "\x1b[31mred\n")(data)
    plan_path.write_text(json.dumps(data))
    assert read_plan(plan_path).trace.tensors[0].layer == r"\x1b[31mred\n"


def test_an_error_is_short_however_long_a_name_is(plan_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    data["x" * 50_000] = 1
    plan_path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=r'plan\.json: unknown field "x') as caught:
        read_plan(plan_path)
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize("field", ["policy", "trace", "migrations", "prediction", "schema"])
def test_refuses_missing_fields(plan_path: Path, field: str) -> None:
    data = json.loads(plan_path.read_text())
    del data[field]
    plan_path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=f'field "{field}" is missing'):
        read_plan(plan_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is a list of 0, expected an object"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"schema_version": 1.5}', "has the number 1.5; only integers"),
        (b'{"schema_version": NaN}', "has the number NaN"),
        (b'{"schema_version": -0}', "has the number -0; write 0"),
        (b'{"schema": "a", "schema": "b"}', 'has the field "schema" twice'),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", "a number has thousands of digits"),
    ],
)
def test_refuses_what_is_not_such_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    for read in (read_trace, read_plan, read_runs):
        with pytest.raises(FileFormatError, match=message):
            read(path)


def test_refuses_every_truncation(plan_path: Path, tmp_path: Path) -> None:
    content = plan_path.read_bytes()
    short = tmp_path / "short.json"
    for length in range(0, len(content) - 2, 997):
        short.write_bytes(content[:length])
        with pytest.raises(FileFormatError, match="is not JSON"):
            read_plan(short)


def test_refuses_absent_and_huge_files(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        read_plan(tmp_path / "absent.json")
    monkeypatch.setattr(json_files, "MAX_FILE_NBYTES", 100)
    with pytest.raises(FileFormatError, match="files over 100 are not read"):
        read_plan(plan_path)


def test_reading_takes_the_memory_of_text_and_value(tmp_path: Path) -> None:
    """And not that of the file's bytes, too. A letter may lie across two pieces."""
    path, value = tmp_path / "large.json", "x" * (MIB - 2) + "ü" + "x" * 9 * MIB
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    nbytes = sys.getsizeof(value)
    tracemalloc.start()
    try:
        assert json_files.load(path).text(nbytes) == value
        assert tracemalloc.get_traced_memory()[1] < 2.5 * nbytes
    finally:
        tracemalloc.stop()


def test_pipes_without_end_are_not_read_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_FILE_NBYTES", 100)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b" " * 101))
    writer.start()
    with pytest.raises(FileFormatError, match="has more than 100 bytes"):
        read_plan(pipe)
    writer.join(20)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        json_files.write_object({"a": object()}, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_tensors_of_one_name_are_not_written(tmp_path: Path) -> None:
    trace = gpt_trace(1)
    doubled = replace(trace, tensors=(trace.tensors[0], *trace.tensors[:-1]))
    with pytest.raises(FileFormatError, match="names 2 tensors"):
        write_trace(doubled, tmp_path / "file.json")


def test_migrations_are_one_per_line(plan_path: Path) -> None:
    lines = plan_path.read_text().splitlines()
    plan = read_plan(plan_path)
    named = [line for line in lines if '"tensor": "g0.c0/' in line]
    assert len(named) == len(plan.migrations)


def test_a_split_comes_back_as_it_was_written(plan_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    assert data["migrations"][0]["tier"] == "storage"
    data["migrations"][0]["host_bytes"] = 4096
    plan_path.write_text(json.dumps(data))
    plan = read_plan(plan_path)
    assert plan.migrations[0].host_bytes == 4096
    write_plan(plan, plan_path)
    assert read_plan(plan_path) == plan


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ("cpu", r'tier: "cpu" is not one of host, storage$'),
        ("device", r'tier: "device" is not one of host, storage; without a migration a tensor st'),
    ],
)
def test_a_migration_goes_to_another_tier(plan_path: Path, tier: str, message: str) -> None:
    data = json.loads(plan_path.read_text())
    data["migrations"][0] |= {"tier": tier}
    plan_path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=message):
        read_plan(plan_path)


def test_refuses_a_split_of_what_goes_to_the_host(plan_path: Path) -> None:
    data = json.loads(plan_path.read_text())
    data["migrations"][0] |= {"tier": "host", "host_bytes": 4096}
    plan_path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=r'host_bytes: is 4096 beside the tier "host"; a te'):
        read_plan(plan_path)


def test_reads_version_6() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v6.json")
    assert read_plan(folder / "plan_v6.json") == plan
    assert check_plan(plan) == ()
    assert plan.trace.fingerprint.chunk_bytes == 1 << 20
    assert plan.storage_pace is None
    assert len(runs) == 1


def test_reads_version_5() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v5.json")
    assert read_plan(folder / "plan_v5.json") == plan
    assert check_plan(plan) == ()
    assert plan.trace.fingerprint.chunk_bytes is None
    require_same_program(plan, replace(plan.trace.fingerprint, chunk_bytes=4096))
    assert len(runs) == 1


def test_reads_version_4() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v4.json")
    assert read_plan(folder / "plan_v4.json") == plan
    assert check_plan(plan) == ()
    assert any(m.host_bytes for m in plan.migrations)
    assert plan.hardware.staging_bytes == 0
    assert len(runs) == 1


def test_reads_version_3() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v3.json")
    assert read_plan(folder / "plan_v3.json") == plan
    assert check_plan(plan) == ()
    assert plan.host_updates
    assert plan.hardware.host_cores is not None
    assert {m.tier for m in plan.migrations} == {Tier.HOST, Tier.STORAGE}
    assert {m.host_bytes for m in plan.migrations} == {0}
    assert len(runs) == 1


def test_reads_version_2() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v2.json")
    assert read_plan(folder / "plan_v2.json") == plan
    assert read_trace(folder / "trace_v2.json") == plan.trace
    assert check_plan(plan) == ()
    assert plan.hardware.device_port is not None
    assert plan.hardware.host_cores is None
    assert plan.prediction.bound_ns > 0
    assert {tensor.changed_in for tensor in plan.trace.tensors} == {(0,)}
    assert (plan.host_updates, plan.trace.updates) == ((), ())
    assert len(runs) == 1


def test_reads_version_1() -> None:
    folder = Path(__file__).parents[1] / "compat"
    plan, runs = read_runs(folder / "runs_v1.json")
    assert read_plan(folder / "plan_v1.json") == plan
    assert read_trace(folder / "trace_v1.json") == plan.trace
    assert check_plan(plan) == ()
    assert plan.hardware.device_port is None
    assert plan.prediction.bound_ns == 0
    assert plan.prediction.gap is None
    assert {tensor.changed_in for tensor in plan.trace.tensors} == {None}
    assert len(runs) == 1
