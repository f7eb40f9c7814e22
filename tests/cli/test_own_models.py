"""`teraplan trace --model`: modules of the user on fake tensors, and what is wrong with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from teraplan.cli import main
from teraplan.files.trace_file import read_trace
from teraplan.values.step_trace import TensorKind
from tests.cli.example_files import Captured, assert_one_line, loaded


def test_a_module_of_the_user_on_fake_tensors(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "t.json"
    arguments = ["trace", "--model", "tests.cli.own_model:build", "--hardware", "h200"]
    assert main([*arguments, "-o", str(path), "--json"]) == 0
    said = loaded(capsys)
    trace = read_trace(path)
    assert said["sites"] == len(trace.sites)
    by_kind = {kind: {t.name: t for t in trace.tensors if t.kind is kind} for kind in TensorKind}
    assert set(by_kind[TensorKind.PARAMETER]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    weight = by_kind[TensorKind.PARAMETER]["0.weight"]
    assert weight.nbytes == 4 * 512 * 1024
    assert weight.persistent
    # in the update alone, which decays it first and adds to it last
    assert weight.changes == (len(weight.windows) - 2, len(weight.windows) - 1)
    assert by_kind[TensorKind.GRADIENT]["0.weight.grad"].nbytes == weight.nbytes
    moments = by_kind[TensorKind.OPTIMIZER_STATE]
    assert {"0.weight.exp_avg", "0.weight.exp_avg_sq"} <= set(moments)
    assert all(moment.persistent for moment in moments.values())
    saved = [t for t in trace.tensors if t.kind is TensorKind.ACTIVATION and len(t.windows) > 1]
    assert any(t.nbytes == 4 * 64 * 1024 for t in saved)
    # two products forward, three backward: 2 * 64 * (512 * 1024 + 1024 * 8) each way
    assert trace.duration_ns > 0


def traced(name: str, path: Path) -> int:
    arguments = ["trace", "--model", f"tests.cli.own_model:{name}", "--hardware", "h100-nvl:ssd=1"]
    return main([*arguments, "-o", str(path)])


def test_each_operation_is_as_fast_as_its_own_dtype(tmp_path: Path) -> None:
    """Parameters were converted after they had been made, too."""
    assert traced("converted", tmp_path / "half.json") == 0
    assert traced("single", tmp_path / "single.json") == 0
    half, single = (read_trace(tmp_path / name) for name in ("half.json", "single.json"))
    assert half.duration_ns * 3 < single.duration_ns


def test_a_factory_may_look_at_what_it_makes(tmp_path: Path) -> None:
    assert traced("looks_at_values", tmp_path / "t.json") == 0
    names = {tensor.name for tensor in read_trace(tmp_path / "t.json").tensors}
    assert {"weight", "bias", "weight.grad"} <= names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("double", "multiplies matrices in float64, and the machine has no speed for that"),
        ("data_dependent", "the model cannot run without memory for tensors: DataDependent"),
        ("fails", "the factory fails: KeyError: 'a bug"),
        ("no_module", "the factory must return a module and a tuple or dict of its inputs"),
        ("no_gradient", "no output of the module depends on a parameter"),
        ("no_function", "3 is no function; write MODULE:FUNCTION"),
        ("absent", "write MODULE:FUNCTION"),
    ],
)
def test_what_cannot_be_traced_says_why(
    name: str, message: str, tmp_path: Path, capsys: Captured
) -> None:
    assert traced(name, tmp_path / "t.json") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('not today')", "SystemExit: not today"),
        ("import sys\ndef build(): sys.exit(3)", "the factory fails: SystemExit: 3"),
    ],
)
def test_modules_and_factories_that_fail_are_named(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "failing_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_model", raising=False)
    arguments = ["trace", "--hardware", "h200", "-o", str(tmp_path / "t.json")]
    assert main([*arguments, "--model", "failing_model:build"]) == 2
    assert_one_line(capsys, message)
    assert main([*arguments, "--model", ".failing_model:build"]) == 2
    assert_one_line(capsys, "write MODULE:FUNCTION")


@pytest.mark.slow
def test_the_command_finds_modules_in_the_working_directory(tmp_path: Path) -> None:
    """The script of an installed package has its own folder on the path, not the working one."""
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    import my_sizes\n"
        "    return torch.nn.Linear(my_sizes.WIDE, 4), (torch.ones(2, my_sizes.WIDE),)\n"
    )
    (tmp_path / "my_sizes.py").write_text("WIDE = 8\n")
    script = tmp_path / "bin" / "teraplan"
    script.parent.mkdir()
    script.write_text("import sys\nfrom teraplan.__main__ import main\nsys.exit(main())\n")
    arguments = ["trace", "--model", "my_models:build", "--hardware", "h200", "-o", "t.json"]
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.json").exists()
