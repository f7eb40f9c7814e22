"""Every command: its output, its exit codes, and the one line that each error prints."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraplan.checker.check_plan import check_plan
from teraplan.cli import main
from teraplan.cli.entry import COMMANDS
from teraplan.files.plan_file import write_plan
from teraplan.files.trace_file import write_trace
from teraplan.planners import as_it_is, with_choices_of
from teraplan.values.hardware import Tier
from tests.cli.example_files import Captured, Files, assert_one_line, loaded, python
from tests.report.example_plan import DISK, make_plan, make_run
from tests.report.golden import assert_golden


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_an_example_and_json(command: Any, capsys: Captured) -> None:  # noqa: ANN401
    with pytest.raises(SystemExit) as stopped:
        main([command.name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  teraplan {command.name} " in text
    assert "--json" in text


def test_help_lists_every_command_and_exit_code(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert all(f"    {command.name} " in text for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["show"], ["diff", "a"], ["timeline", "a"], ["plot", "a"]]
)
def test_wrong_usage_is_2(arguments: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: teraplan" in capsys.readouterr().err


def test_show(files: Files, capsys: Captured) -> None:
    assert main(["show", files.plan]) == 0
    assert_golden("show.txt", capsys.readouterr().out.removesuffix("\n"))


@pytest.mark.parametrize("arguments", [[], ["--all"]])
def test_show_of_a_run_file_ends_with_what_happened(
    arguments: list[str], files: Files, capsys: Captured
) -> None:
    assert main(["show", files.plan, *arguments]) == 0
    planned = capsys.readouterr().out
    assert main(["show", files.run, *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{planned}\n")
    assert_golden("show_run.txt", text.removeprefix(f"{planned}\n").removesuffix("\n"))


def test_show_json_of_a_run_file(files: Files, capsys: Captured) -> None:
    plan = make_plan()
    assert main(["show", files.plan, "--json"]) == 0
    planned = loaded(capsys)
    assert planned.pop("runs") is None
    assert main(["show", files.run, "--json"]) == 0
    facts = loaded(capsys)
    runs = facts.pop("runs")
    assert facts == planned
    assert runs["steps"] == [7, 8]
    assert runs["step_ns"]["predicted"] == plan.prediction.step_ns
    assert runs["step_ns"]["median"] == make_run(plan).duration_ns
    assert runs["mean_wait_ns"] == {"g0.c8/gelu_1": 4_000_000}
    assert runs["host_out_bytes"]["most"] == plan.prediction.out_bytes[Tier.HOST]


def test_show_json(files: Files, capsys: Captured) -> None:
    assert main(["show", files.plan, "--json", "--all"]) == 0
    facts = loaded(capsys)
    assert facts["prediction"]["stall_ns"] == {"g0.c7/gelu_1": 18762377, "g0.c8/gelu_1": 18762376}
    assert facts["rows"][0]["layer"] == "blocks.{0-8}.mlp"
    assert facts["migrations"][0]["tensor"] == "g0.c0/sdpa_0"


def test_diff(files: Files, capsys: Captured) -> None:
    assert main(["diff", files.plan, files.other]) == 1
    assert_golden("diff.txt", capsys.readouterr().out.removesuffix("\n"))
    assert main(["diff", files.plan, files.run]) == 0
    assert capsys.readouterr().out == "The plans are equal.\n"


def test_the_pace_of_storage_is_shown_compared_and_simulated(
    files: Files, tmp_path: Path, capsys: Captured
) -> None:
    path = str(tmp_path / "paced.json")
    plan = replace(make_plan(), storage_pace=DISK.times(0.01))
    paced = with_choices_of(plan, plan.trace, plan.hardware)
    assert paced is not None
    write_plan(paced, Path(path))
    assert paced.prediction.step_ns > 2 * make_plan().prediction.step_ns
    assert main(["check", path]) == 0
    capsys.readouterr()
    assert main(["show", path]) == 0
    assert "driven at most at" in capsys.readouterr().out
    assert main(["diff", files.plan, path]) == 1
    assert "as fast as it can" in capsys.readouterr().out
    assert main(["show", path, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["storage_pace"]["out_bytes_per_s"]
    assert said == DISK.out_bytes_per_s // 100


@pytest.mark.parametrize("policy", ["\x1b[2J", "\ud800", "a\nb"])
def test_text_of_a_file_is_no_command_to_the_terminal(
    policy: str, files: Files, tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "odd.json"
    text = Path(files.plan).read_text()
    odd = json.loads(text) | {"policy": policy}
    odd["trace"]["fingerprint"]["torch_version"] = policy
    path.write_text(json.dumps(odd))
    for arguments in (["show"], ["check"], ["diff", files.plan], ["plot", "-o", str(files.out)]):
        main([arguments[0], str(path), *arguments[1:]])
        shown = capsys.readouterr()
        assert not {"\x1b", "\ud800"} & {*shown.out, *shown.err}, arguments[0]


def test_a_file_that_is_read_is_not_written_over(files: Files, capsys: Captured) -> None:
    before = Path(files.plan).read_bytes()
    for command in ("timeline", "plot"):
        link = Path(files.plan).with_suffix(".json" if command == "timeline" else ".png")
        if not link.exists():
            link.hardlink_to(files.plan)
        assert main([command, files.plan, "-o", str(link)]) == 2
        assert_one_line(capsys, "is read, and would be lost")
    assert Path(files.plan).read_bytes() == before


def test_a_migration_that_is_there_twice_is_a_difference(files: Files, capsys: Captured) -> None:
    plan = make_plan()
    twice = files.out / "twice.json"
    write_plan(replace(plan, migrations=(*plan.migrations, plan.migrations[0])), twice)
    assert main(["diff", files.plan, str(twice)]) == 1
    assert "added (" in capsys.readouterr().out
    assert main(["diff", str(twice), files.plan]) == 1
    assert "removed (" in capsys.readouterr().out


def test_diff_json(files: Files, capsys: Captured) -> None:
    assert main(["diff", files.plan, files.other, "--json"]) == 1
    changes = loaded(capsys)
    assert not changes["equal"]
    assert changes["decisions"][0]["tensors"] == ["g0.c7/gelu_1", "g0.c8/gelu_1"]


def test_check(files: Files, capsys: Captured) -> None:
    assert main(["check", files.plan]) == 0
    assert_golden("check_valid.txt", capsys.readouterr().out.removesuffix("\n"))
    assert main(["check", files.broken]) == 1
    assert_golden("check_late.txt", capsys.readouterr().out.removesuffix("\n"))


def test_check_json(files: Files, capsys: Captured) -> None:
    assert main(["check", files.plan, "--json"]) == 0
    assert loaded(capsys)["verified_peak_bytes"]["device"] == 2745171968
    assert main(["check", files.broken, "--json"]) == 1
    (violation,) = loaded(capsys)["violations"]
    assert (violation["kind"], violation["migration"]) == ("period", 0)


def test_an_edited_plan_is_what_it_says_now(files: Files, capsys: Captured) -> None:
    """What its file predicts is of the plan before, and does not count."""
    plan = make_plan()
    budgets = replace(plan.budgets, device_bytes=plan.budgets.device_bytes * 2)
    edited = replace(plan, budgets=budgets, migrations=plan.migrations[1:])
    path = files.out / "edited.json"
    write_plan(edited, path)
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The plan holds: 12 migrations")
    assert "was edited, and its prediction is of the plan before:\n  device_peak_bytes is" in said
    assert main(["check", str(path), "--json"]) == 0
    facts = loaded(capsys)
    assert facts["valid"]
    assert facts["outdated"]
    assert facts["verified_peak_bytes"]["device"] > plan.prediction.device_peak_bytes
    assert main(["plot", str(path), "-o", str(files.out / "edited.png")]) == 0
    assert main(["timeline", str(path), "-o", str(files.out / "edited.json.gz")]) == 0
    again = as_it_is(edited)
    capsys.readouterr()
    assert main(["show", str(path), "--json"]) == 0
    shown = loaded(capsys)
    assert shown["notes"] == [
        f"{path} was edited, or another version made it: the prediction is made anew"
    ]
    for field in ("device_peak_bytes", "step_ns"):
        assert shown["prediction"][field] == getattr(again.prediction, field)
    assert again.prediction.device_peak_bytes != plan.prediction.device_peak_bytes
    write_plan(again, files.out / "again.json")
    assert main(["diff", str(path), str(files.out / "again.json")]) == 0
    assert "made anew\nThe plans are equal." in capsys.readouterr().out
    assert main(["show", files.broken]) == 0
    assert "does not hold: it breaks 1 rule (`teraplan check` names" in capsys.readouterr().out
    assert again.migrations == edited.migrations
    assert not check_plan(again)
    assert as_it_is(again) is again


def test_an_edit_that_changes_times_alone_is_seen(files: Files, capsys: Captured) -> None:
    """Peaks and bytes are as they were, and so the checker has nothing to say."""
    plan = make_plan()
    late = tuple(replace(m, back=m.needed) for m in plan.migrations)
    edited, path = replace(plan, migrations=late), files.out / "late.json"
    assert not check_plan(edited)
    write_plan(edited, path)
    step_ns = as_it_is(edited).prediction.step_ns
    assert step_ns > plan.prediction.step_ns
    assert main(["check", str(path)]) == 0
    said = f"step_ns is {plan.prediction.step_ns} in the plan, {step_ns} by a simulation of it"
    assert said in capsys.readouterr().out
    assert main(["show", str(path), "--json"]) == 0
    shown = loaded(capsys)
    assert len(shown["notes"]) == 1
    assert shown["prediction"]["step_ns"] == step_ns
    assert main(["plot", str(path), "-o", str(files.out / "late.png")]) == 0


def test_plans_of_steps_that_were_measured_otherwise_are_not_equal(
    files: Files, capsys: Captured
) -> None:
    plan = make_plan()
    first, *rest = plan.trace.sites
    sites = (replace(first, duration_ns=first.duration_ns + 1), *rest)
    path = files.out / "slower.json"
    write_plan(as_it_is(replace(plan, trace=replace(plan.trace, sites=sites))), path)
    assert main(["diff", files.plan, str(path), "--json"]) == 1
    facts = {fact["name"]: fact for fact in loaded(capsys)["facts"]}
    assert facts["measured step"]["before"] == "times"


def test_a_bound_in_a_file_is_not_believed(files: Files, capsys: Captured) -> None:
    """Without migrations the step is shorter than the bound for the budget that there was."""
    plan = make_plan()
    said = replace(plan.prediction, bound_ns=plan.prediction.step_ns)
    budgets = replace(plan.budgets, device_bytes=plan.prediction.unlimited_peak_bytes)
    edited = replace(plan, budgets=budgets, migrations=(), prediction=said)
    path, trace = files.out / "edited.json", files.out / "trace.json"
    write_plan(edited, path)
    write_trace(plan.trace, trace)
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(trace), str(path), "--json"]) == 0
    found = loaded(capsys)["prediction"]
    assert found["bound_ns"] == found["step_ns"] == plan.trace.duration_ns < said.bound_ns


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_timeline(files: Files, name: str, capsys: Captured) -> None:
    path = files.out / name
    assert main(["timeline", files.run, "-o", str(path), "--json"]) == 0
    facts = loaded(capsys)
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert facts["num_events"] == len(trace["traceEvents"])
    assert facts["processes"] == ["planned", "actual, step 8"]


def test_timeline_says_where_to_open_it(files: Files, capsys: Captured) -> None:
    path = files.out / "out.json"
    assert main(["timeline", files.plan, "-o", str(path)]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().out


def test_the_same_plan_gives_the_same_timeline_file(files: Files) -> None:
    first, second = files.out / "1.json.gz", files.out / "2.json.gz"
    assert main(["timeline", files.plan, "-o", str(first)]) == 0
    assert main(["timeline", files.plan, "-o", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()


def test_a_step_of_a_run_can_be_chosen(files: Files, capsys: Captured) -> None:
    path = str(files.out / "out.json")
    assert main(["timeline", files.run, "--step", "7", "-o", path, "--json"]) == 0
    assert loaded(capsys)["processes"] == ["planned", "actual, step 7"]
    assert main(["timeline", files.run, "--step", "3", "-o", path]) == 2
    assert_one_line(capsys, "has no step 3; it has 7, 8")
    assert main(["timeline", files.plan, "--step", "3", "-o", path]) == 2
    assert_one_line(capsys, "is a plan, not a run; --step needs a run file")


@pytest.mark.parametrize("name", ["out.png", "out.svg", "out.pdf"])
def test_plot(files: Files, name: str, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    path = files.out / name
    assert main(["plot", files.run, "-o", str(path), "--json"]) == 0
    assert loaded(capsys) == {"path": str(path), "actual": True}
    assert path.stat().st_size > 10_000


def test_plot_without_matplotlib(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for name in [name for name in sys.modules if name.startswith("teraplan.report.picture")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", files.plan, "-o", str(files.out / "out.png")]) == 2
    assert_one_line(capsys, "needs matplotlib", "pip install 'teraplan[plot]'")
    assert not list(files.out.glob("*.png"))
    assert not list(files.out.glob(".*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "{}"],
        ["diff", "{}", "{}"],
        ["check", "{}"],
        ["timeline", "{}", "-o", "out.json"],
        ["plot", "{}", "-o", "out.png"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_bad_files_are_2(arguments: list[str], tmp_path: Path, capsys: Captured) -> None:
    absent = str(tmp_path / "absent.json")
    assert main([argument.format(absent) for argument in arguments]) == 2
    assert_one_line(capsys, f"teraplan {arguments[0]}: ", "cannot be read: No such file")
    garbage = tmp_path / "garbage.json"
    for text, message in (("{", "is not JSON"), ('{"schema": "x"}', 'schema: is "x"')):
        garbage.write_text(text)
        assert main([argument.format(garbage) for argument in arguments]) == 2
        assert_one_line(capsys, message)


@pytest.mark.parametrize(("command", "name"), [("timeline", "out.txt"), ("plot", "out.jpg")])
def test_unknown_output_formats_are_2(
    files: Files, command: str, name: str, capsys: Captured
) -> None:
    assert main([command, files.plan, "-o", str(files.out / name)]) == 2
    assert_one_line(capsys, name, "change the name")


@pytest.mark.parametrize(("command", "name"), [("timeline", "out.json"), ("plot", "out.png")])
def test_places_that_cannot_be_written_are_2(
    files: Files, command: str, name: str, capsys: Captured
) -> None:
    assert main([command, files.plan, "-o", str(files.out / "absent" / name)]) == 2
    assert_one_line(capsys, "cannot be written: No such file or directory; choose another place")


@pytest.mark.parametrize(("command", "name"), [("timeline", "out.json"), ("plot", "out.png")])
def test_a_plan_that_does_not_hold_is_not_drawn(
    files: Files, command: str, name: str, capsys: Captured
) -> None:
    assert main([command, files.broken, "-o", str(files.out / name)]) == 2
    assert "the plan breaks 1 rule:" in capsys.readouterr().err
    assert not (files.out / name).exists()


def test_reading_plans_imports_no_torch(files: Files) -> None:
    code = (
        "import sys, teraplan.cli as c; "
        f"c.main(['show', {files.plan!r}]); c.main(['check', {files.plan!r}]); "
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert python("-c", code, PYTHONIOENCODING="utf-8").returncode == 0


def test_module_can_be_run_on_a_terminal_without_unicode(files: Files) -> None:
    done = python("-m", "teraplan", "show", files.plan, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"forward -> backward" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["probe"],
        ["trace", "--model", "tests.cli.own_model:build", "--hardware", "h200", "-o", "t.json"],
    ],
)
def test_what_needs_torch_says_so(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(arguments) == 2
    assert_one_line(capsys, f"teraplan {arguments[0]}: needs torch: pip install torch")
