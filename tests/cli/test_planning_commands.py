"""Commands that plan: from no hardware to a plan, what fits and what does not, wrong input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from teraplan.checker.check_plan import check_plan
from teraplan.cli import main
from teraplan.cli.planning import library_trace
from teraplan.errors import ConfigError
from teraplan.files import trace_file
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.files.trace_file import read_trace, write_trace
from teraplan.library.machines import machine_named
from teraplan.library.models import Workload
from teraplan.simulation.memory_curve import device_curve, peak
from teraplan.units import MIB
from tests.cli.example_files import Captured, assert_one_line, loaded
from tests.planning.synthetic import gpt_trace

UNET = ["--library", "unet", "--batch", "8", "--length", "256"]
FEW_TOKENS = ["--library", "llama3-8b", "--stages", "8", "--length", "512"]
"""Most of the memory is state."""
LIBRARY = ["--library", "vit-g", "--batch", "32", "--length", "256"]


@pytest.mark.slow
def test_from_no_hardware_to_a_simulated_plan(tmp_path: Path, capsys: Captured) -> None:
    machine, trace, plan = (str(tmp_path / name) for name in ("m.json", "t.json", "p.json"))
    assert main(["hardware", "rtx-4090:ssd=2", "-o", machine]) == 0
    assert "NVIDIA Ada architecture white paper" in capsys.readouterr().out
    assert main(["trace", *LIBRARY, "--hardware", machine, "-o", trace, "--json"]) == 0
    assert loaded(capsys)["sites"] == len(read_trace(Path(trace)).sites)
    arguments = ["plan", trace, "--hardware", machine, "--device-budget", "60%", "-o", plan]
    assert main([*arguments, "--json"]) == 0
    said = loaded(capsys)
    assert said["fits"] is True
    made = read_plan(Path(plan))
    assert check_plan(made) == ()
    assert made.prediction.gap is not None
    assert main(["simulate", trace, plan]) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "What the step is as long as:" in shown
    assert "computation" in shown.partition("as long as:")[2]
    assert main(["simulate", trace, plan, "--hardware", "rtx-4090:ssd=12", "--json"]) == 0
    said = loaded(capsys)
    assert said["fits"] is True
    assert said["critical_path"]["computation_ns"] <= made.prediction.ideal_ns
    assert main(["simulate", trace, plan, "--hardware", "rtx-4090:host=0:ssd=0"]) == 2


def test_places_that_cannot_be_written_are_2(tmp_path: Path, trace: str, capsys: Captured) -> None:
    place = ["--device-budget", "99%", "-o", str(tmp_path / "absent" / "out.json")]
    for command in (
        ["hardware", "rtx-4090", *place[2:]],
        ["trace", *LIBRARY, "--hardware", "rtx-4090", *place[2:]],
        ["plan", trace, "--hardware", "rtx-4090", *place],
    ):
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert "out.json: cannot be written: No such file or directory; choose another" in shown
        assert shown.count("\n") == 1


@pytest.mark.slow
def test_updates_on_the_host_are_shown_drawn_and_compared(tmp_path: Path, capsys: Captured) -> None:
    plain, hosted = tmp_path / "plain.json", tmp_path / "hosted.json"
    trace = str(tmp_path / "t.json")
    for path, machine in ((plain, "h100-nvl"), (hosted, "h100-nvl:cores=published")):
        if path is plain:
            assert main(["trace", *FEW_TOKENS, "--hardware", machine, "-o", trace]) == 0
        arguments = ["plan", trace, "--hardware", machine, "--device-budget", "40%"]
        assert main([*arguments, "-o", str(path)]) == 0
    made = read_plan(hosted)
    assert made.host_updates
    assert made.prediction.step_ns < read_plan(plain).prediction.step_ns
    capsys.readouterr()
    assert main(["show", str(hosted)]) == 0
    shown = capsys.readouterr().out
    assert f"{len(made.host_updates)} of {len(made.trace.updates)} updates run on the" in shown
    assert main(["show", str(hosted), "--all"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host cores")]
    count = sum(len(made.trace.updates[h.update].tensor_ids) for h in made.host_updates)
    assert len(lines) == count
    assert main(["diff", str(plain), str(hosted)]) in (0, 1)
    assert "update on the host" in capsys.readouterr().out
    later = [replace(h, needed=h.needed + 1) for h in made.host_updates]
    write_plan(replace(made, host_updates=tuple(later)), tmp_path / "later.json")
    assert main(["diff", str(hosted), str(tmp_path / "later.json")]) == 1
    assert "update on the host, other sites" in capsys.readouterr().out
    assert main(["timeline", str(hosted), "-o", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = [event for event in events if event.get("cat") == "update"]
    assert len(done) == len(made.host_updates)
    assert sum(event["dur"] for event in done) * 1000 <= made.prediction.step_ns
    capsys.readouterr()
    write_trace(made.trace, tmp_path / "t.json")
    assert main(["simulate", str(tmp_path / "t.json"), str(hosted), "--json"]) == 0
    assert loaded(capsys)["prediction"]["step_ns"] == made.prediction.step_ns
    arguments = ["simulate", str(tmp_path / "t.json"), str(hosted), "--hardware", "h100-nvl"]
    assert main(arguments) == 2
    assert "no host_cores" in capsys.readouterr().err


def test_what_does_not_fit_has_exit_code_1(trace: str, tmp_path: Path, capsys: Captured) -> None:
    arguments = ["plan", trace, "--hardware", "h200", "-o", str(tmp_path / "p.json")]
    assert main([*arguments, "--device-budget", "1MiB", "--json"]) == 1
    said = loaded(capsys)
    assert said["fits"] is False
    assert main([*arguments, "--device-budget", str(said["least_budget_bytes"])]) == 0
    capsys.readouterr()
    assert main([*arguments, "--device-budget", "1MiB"]) == 1
    assert capsys.readouterr().out.startswith("does not fit: ")


def test_plan_and_estimate_name_a_least_budget_that_works(
    trace: str, tmp_path: Path, capsys: Captured
) -> None:
    """Tensors of 32, 33 and 128 MiB do not fill 100 MiB."""
    step = [trace, "--hardware", "h200:ssd=1", "--host-budget", "0", "--storage-budget", "100MiB"]
    plan = ["plan", *step, "-o", str(tmp_path / "p.json")]
    assert main([*plan, "--device-budget", "1MiB", "--json"]) == 1
    least = loaded(capsys)["least_budget_bytes"]
    assert least > peak(device_curve(read_trace(Path(trace)))) - 100 * MIB
    for budget, code in (("1MiB", 1), (str(least), 0), ("100%", 0)):
        assert main(["estimate", *step, "--device-budget", budget, "--json"]) == code
        assert loaded(capsys)["least_device_bytes"] == least
    assert main([*plan, "--device-budget", str(least)]) == 0


def test_twice_the_ssds_hold_twice_as_much(trace: str, tmp_path: Path, capsys: Captured) -> None:
    machine = tmp_path / "m.json"
    assert main(["hardware", "h200:ssd=1:host=0", "-o", str(machine)]) == 0
    data = json.loads(machine.read_text())
    most = peak(device_curve(read_trace(Path(trace))))
    data["hardware"]["storage_capacity_bytes"] = most // 4
    machine.write_text(json.dumps(data))
    capsys.readouterr()
    step = [trace, "--hardware", str(machine), "--device-budget", "65%", "--json"]
    assert main(["estimate", *step]) == 1
    changes = {change["name"]: change["step_ns"] for change in loaded(capsys)["changes"]}
    assert changes["twice the SSDs"] is not None


@pytest.mark.slow
def test_policies_rules_and_candidates(trace: str, tmp_path: Path, capsys: Captured) -> None:
    rules, first, second = (tmp_path / name for name in ("r.json", "1.json", "2.json"))
    rules.write_text('{"blocks.*": "storage"}')
    arguments = ["plan", trace, "--hardware", "h200:ssd=1", "--device-budget", "75%"]
    assert main([*arguments, "--rules", str(rules), "-o", str(first)]) == 0
    assert {m.tier.value for m in read_plan(first).migrations} == {"storage"}
    assert main([*arguments, "--policy", "g10", "--candidate", str(first), "-o", str(second)]) == 0
    rules.write_text('{"nothing.*": "storage"}')
    capsys.readouterr()
    assert main([*arguments, "--rules", str(rules), "-o", str(first)]) == 2
    assert 'rule "nothing.*" matches no tensor' in capsys.readouterr().err


def test_a_plan_for_another_step_is_refused(trace: str, tmp_path: Path, capsys: Captured) -> None:
    plan, other = tmp_path / "p.json", tmp_path / "other.json"
    write_trace(gpt_trace(5), other)
    arguments = ["plan", trace, "--hardware", "h200", "--device-budget", "75%", "-o", str(plan)]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(["simulate", str(other), str(plan)]) == 2
    assert "the plan is for another step" in capsys.readouterr().err


def test_a_plan_in_the_wrong_order_is_refused(trace: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "p.json"
    arguments = ["plan", trace, "--hardware", "h200", "--device-budget", "75%", "-o", str(path)]
    assert main(arguments) == 0
    plan = json.loads(path.read_text())
    plan["migrations"][0]["needed"] = 0
    path.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["simulate", trace, str(path)]) == 1
    assert "the order is leave <= gone < back <= needed" in capsys.readouterr().out
    assert main(["simulate", trace, str(path), "--json"]) == 1
    assert loaded(capsys)["fits"] is False


def test_a_tighter_bound(trace: str, tmp_path: Path) -> None:
    plan = tmp_path / "p.json"
    arguments = ["plan", trace, "--hardware", "a100:ssd=1:host=0", "--device-budget", "70%"]
    assert main([*arguments, "-o", str(plan)]) == 0
    quick = read_plan(plan).prediction
    assert main([*arguments, "--tight-bound", "-o", str(plan)]) == 0
    tight = read_plan(plan).prediction
    assert quick.bound_ns < tight.bound_ns <= tight.step_ns == quick.step_ns


@pytest.mark.exhaustive
@pytest.mark.slow
def test_estimate_tells_what_would_help(capsys: Captured) -> None:
    small = ["--hardware", "rtx-4090:ssd=1:host=1GiB", "--device-budget", "75%"]
    assert main(["estimate", *UNET, *small, "--json"]) == 0
    said = loaded(capsys)
    names = {change["name"] for change in said["changes"]}
    assert names == {
        "twice the SSDs",
        "twice the host memory",
        "a quarter more device memory",
        "twice the batch",
    }
    for change in said["changes"]:
        if change["name"] != "twice the batch":
            assert change["step_ns"] <= said["step_ns"]
    assert said["bound_ns"] <= said["step_ns"]
    assert main(["estimate", *UNET, *small[:2], "--device-budget", "100%"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("It fits.\n")
    assert "times as fast" in text
    assert main(["estimate", *UNET, *small[:2], "--device-budget", "1MiB"]) == 1
    assert capsys.readouterr().out.startswith("It does not fit: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "--hardware", "h200"], "give a trace file, or --library"),
        (["estimate", "TRACE", "--library", "unet", "--hardware", "h200"], "not both"),
        (["estimate", "TRACE", "--hardware", "h300"], 'machine "h300" is not one of'),
        (["estimate", "TRACE", "--hardware", "no.json"], "no.json: cannot be read"),
        (["estimate", *LIBRARY, "--stages", "0", "--hardware", "h200"], "--stages: expected 1"),
        (
            ["estimate", "TRACE", "--hardware", "h200", "--device-budget", "big"],
            "budget 'big': expected",
        ),
        (["estimate", "TRACE", "--hardware", "h200", "--batch", "2"], "--batch is for models of"),
        (["sweep", "TRACE", "--hardware", "h200", "--stages", "2"], "--stages is for models of"),
        (
            ["trace", "--hardware", "h200", "--model", "a:b", "--micro-batches", "1", "-o", "t"],
            "--micro-batches is for models of the library",
        ),
        (
            ["trace", "--hardware", "h200", "--model", "a:b", "--dtype", "bfloat16", "-o", "t"],
            "--dtype is for models of the library",
        ),
        (["trace", "--hardware", "h200", "-o", "t.json"], "give either --model"),
        (["trace", "--hardware", "h200", "--model", "nothing:f", "-o", "t.json"], "nothing:f"),
    ],
)
def test_wrong_input_has_exit_code_2(
    arguments: list[str], message: str, trace: str, capsys: Captured
) -> None:
    filled = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(filled) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trace", "estimate", "sweep"])
@pytest.mark.parametrize(
    ("large", "message"),
    [
        (["--batch", "100000000000000"], "durations add up to"),
        (["--batch", "100000000", "--micro-batches", "1000"], "durations add up to"),
        (["--micro-batches", "1000000000"], "it has 1213000000323 operations, at most 4194304"),
    ],
)
def test_steps_too_large_to_be_counted_are_2(
    command: str, large: list[str], message: str, capsys: Captured
) -> None:
    place = ["-o", "t.json"] if command == "trace" else []
    assert main([command, "--library", "vit-g", "--hardware", "h200", *large, *place]) == 2
    said = capsys.readouterr().err
    assert f"the step is too large to be counted with: {message}" in said


@pytest.mark.parametrize("limit", ["MAX_STEP_NS", "MAX_STEP_BYTES"])
def test_what_steps_add_up_to_is_known_before_they_are_built(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, machine = Workload(model="unet", length=64, micro_batches=3), machine_named("h200")
    trace = library_trace(workload, machine)
    nbytes = sum(tensor.nbytes for tensor in trace.tensors)
    nbytes += max(site.workspace_bytes for site in trace.sites)
    most = {"MAX_STEP_NS": trace.duration_ns, "MAX_STEP_BYTES": nbytes}[limit]
    monkeypatch.setattr(trace_file, limit, most)
    assert library_trace(workload, machine) == trace
    monkeypatch.setattr(trace_file, limit, most - 1)
    with pytest.raises(ConfigError, match=f"add up to {most} "):
        library_trace(workload, machine)


@pytest.mark.parametrize("limit", ["nan", "-1", "0", "soon"])
def test_time_limits_are_seconds(trace: str, limit: str, capsys: Captured) -> None:
    arguments = ["plan", trace, "--hardware", "h200", "--time-limit", limit, "-o", "x.json"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "--time-limit" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "estimate", "sweep"])
def test_a_step_with_nothing_in_it(command: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "trace.json"
    write_trace(replace(gpt_trace(1), sites=(), tensors=()), path)
    more = ["-o", str(tmp_path / "plan.json")] if command == "plan" else []
    assert main([command, str(path), "--hardware", "h200", *more]) in (0, 1)
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_no_split_leaves_tensors_whole(trace: str, tmp_path: Path, capsys: Captured) -> None:
    machine, plan = tmp_path / "m.json", tmp_path / "p.json"
    assert main(["hardware", "rtx-4090:ssd=2", "-o", str(machine)]) == 0
    data = json.loads(machine.read_text())
    data["hardware"]["device_port"] = None  # storage on lanes of its own
    machine.write_text(json.dumps(data))
    arguments = ["plan", trace, "--hardware", str(machine), "--device-budget", "42%"]
    for option, expected in ((["--no-split"], False), ([], True)):
        assert main([*arguments, "-o", str(plan), *option]) == 0
        assert any(m.host_bytes for m in read_plan(plan).migrations) is expected
        assert main(["show", str(plan)]) == 0
        assert ("+ storage" in capsys.readouterr().out) is expected


def test_a_budget_beyond_all_numbers_is_as_much_as_there_can_be(
    trace: str, tmp_path: Path, capsys: Captured
) -> None:
    plan = tmp_path / "plan.json"
    budget = ["--device-budget", "9999999999TiB", "--host-budget", "9999999999TiB"]
    assert main(["plan", trace, "--hardware", "h200", *budget, "-o", str(plan)]) == 0
    assert read_plan(plan).migrations == ()
    capsys.readouterr()


@pytest.mark.slow
def test_more_ssds_behind_one_port_are_hardly_slower(capsys: Captured) -> None:
    """The plan for two, as it is, takes 3.3 % longer with four."""
    arguments = [
        "--library",
        "vit-g",
        "--batch",
        "8",
        "--hardware",
        "rtx-4090",
        "--device-budgets",
        "22GiB",
    ]
    assert main(["sweep", *arguments, "--host-budgets", "32GiB", "--ssds", "2,4", "--json"]) == 0
    two, four = (cell["step_ns"] for cell in loaded(capsys)["cells"])
    assert four < 1.005 * two


def test_more_stages_than_layers_are_2(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["trace", "--library", "llama3-8b", "--hardware", "h200"]
    assert main([*arguments, "--stages", "33", "-o", str(tmp_path / "t.json")]) == 2
    assert_one_line(capsys, "llama3-8b has 32 layers, which 33 stages cannot share; ask for at m")


def test_a_machine_that_says_a_thing_twice_is_2(
    trace: str, tmp_path: Path, capsys: Captured
) -> None:
    arguments = [
        "plan",
        trace,
        "--hardware",
        "h100-nvl:ssd=2:ssd=4",
        "-o",
        str(tmp_path / "p.json"),
    ]
    assert main(arguments) == 2
    assert_one_line(capsys, "ssd is there 2 times; give it once")


def test_without_any_link_the_remedy_is_one(trace: str, tmp_path: Path, capsys: Captured) -> None:
    arguments = ["plan", trace, "--hardware", "h200:ssd=0:host=0", "-o", str(tmp_path / "p.json")]
    assert main([*arguments, "--device-budget", "95%"]) == 1
    shown = capsys.readouterr().out
    assert "there is room for nothing, since the hardware has no link to another tier" in shown
    assert "Name a machine with host memory or storage, or raise the device budget to" in shown


def test_a_time_limit_that_is_no_number_is_2(trace: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", trace, "--hardware", "h200", "-o", "p.json", "--time-limit", "soon"])
    assert stopped.value.code == 2
    assert "soon is no number of seconds above 0" in capsys.readouterr().err
