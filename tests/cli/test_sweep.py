"""`teraplan sweep`: its table, what it compares, and what it refuses."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraplan.cli import main, sweep
from teraplan.planners import make_plan
from teraplan.report.sweep_picture import Curve, merged
from teraplan.units import GIB
from teraplan.values.plan import Plan
from tests.cli.example_files import Captured, loaded


def test_sweep_never_gets_slower_with_more(trace: str, tmp_path: Path, capsys: Captured) -> None:
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    arguments = ["sweep", trace, "--hardware", "rtx-4090", "--ssds", "1,4"]
    arguments += ["--device-budgets", "90%,75%,1%", "--host-budgets", "0,1GiB"]
    assert main([*arguments, "--csv", str(table), "--png", str(picture)]) == 0
    assert "no fit" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 12
    fitting = [row for row in rows if row["fits"] == "True"]
    assert len(fitting) == 8
    keys = ("device_bytes", "host_bytes", "ssds")
    for small in fitting:
        for large in fitting:
            if all(int(small[key]) <= int(large[key]) for key in keys):
                assert int(large["step_ns"]) <= int(small["step_ns"])
    assert main([*arguments, "--device-budgets", "1%", "--json"]) == 1
    assert not any(cell["fits"] for cell in loaded(capsys)["cells"])


def test_what_a_sweep_compares_each_plan_with(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for one step less of one thing: each is no slower than those before it."""
    seen: list[list[tuple[int, int]]] = []

    def watched(*arguments: Any, candidates: list[Plan], **options: Any) -> Plan:  # noqa: ANN401
        seen.append([(p.budgets.host_bytes, p.budgets.device_bytes) for p in candidates])
        return make_plan(*arguments, candidates=candidates, **options)

    monkeypatch.setattr(sweep, "make_plan", watched)
    arguments = ["sweep", trace, "--hardware", "rtx-4090", "--ssds", "1,2", "--json"]
    assert main([*arguments, "--device-budgets", "80%,90%", "--host-budgets", "1GiB,2GiB"]) == 0
    assert [len(candidates) for candidates in seen] == [0, 1, 1, 2, 1, 2, 2, 3]
    (_, less), (_, more) = seen[1][0], seen[3][1]
    assert less == more
    assert seen[7] == [(2 * GIB, seen[7][0][1]), (GIB, seen[7][0][1]), (2 * GIB, less)]


def test_a_sweep_keeps_what_the_machine_says(trace: str, capsys: Captured) -> None:
    """Storage behind little staging memory is slower."""
    arguments = ["sweep", trace, "--ssds", "1", "--device-budgets", "62%", "--json"]
    steps_ns: list[int] = []
    for staging in ("", ":staging=256MiB"):
        machine = ["--hardware", f"rtx-4090{staging}", "--host-budgets", "512MiB"]
        assert main([*arguments, *machine]) == 0
        steps_ns.append(loaded(capsys)["cells"][0]["step_ns"])
    assert steps_ns[0] < steps_ns[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h200"], "give a trace file, or --library"),
        (["TRACE", "--library", "unet", "--hardware", "h200"], "not both"),
        (["TRACE", "--hardware", "h200:ssd=2"], 'leave "ssd=2" out, and use --ssds'),
        (["TRACE", "--hardware", "h200:host=1GB"], "and use --host-budgets"),
        (["TRACE", "--hardware", "h.json"], '"h.json" is a file, and here one of'),
        (["TRACE", "--hardware", "h200", "--ssds", "few"], "'few' is no list of numbers"),
        (
            ["TRACE", "--hardware", "h200", "--ssds", "1,13"],
            "--ssds: machines of the library have 0 to 12",
        ),
        (["TRACE", "--hardware", "h200", "--device-budgets", ","], "--device-budgets: is empty"),
        (["TRACE", "--hardware", "h200", "--host-budgets", "1,0.5"], "budget '0.5': expected"),
        (["TRACE", "--hardware", "h200", "--png", "x.txt"], "x.txt: the picture is written as .p"),
        (["TRACE", "--hardware", "h200", "--csv", "TRACE"], "is read, and would be lost; give an"),
        (["TRACE", "--hardware", "h200", "--png", "/no/x.png"], "/no/x.png: cannot be written: No"),
        (["TRACE", "--hardware", "h200", "--csv", "."], ".: cannot be written: Is a directory"),
        (
            ["TRACE", "--hardware", "h200", "--csv", "NEW.png", "--png", "NEW.png"],
            "NEW.png is the file of both --csv and --png; give two",
        ),
    ],
)
def test_wrong_sweeps_are_2_before_anything_is_planned(
    arguments: list[str],
    message: str,
    trace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.delattr(sweep, "make_plan")
    before = Path(trace).read_bytes()
    filled = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(["sweep", *filled]) == 2
    assert message in capsys.readouterr().err
    assert Path(trace).read_bytes() == before


def test_curves_that_lie_on_one_another_are_drawn_once() -> None:
    slow = Curve(label="1 SSD", points=((10, 1000), (20, 500)))
    fast = Curve(label="4 SSDs", points=((10, 400), (20, 300)))
    nearly = Curve(label="12 SSDs", points=((10, 396), (20, 300)))
    least = Curve(label="0 SSDs", points=((20, 300),))
    assert merged([slow, fast, nearly, least]) == [
        slow,
        replace(fast, label="4 SSDs\n12 SSDs"),
        least,
    ]
