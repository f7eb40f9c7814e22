"""Pipes and devices in the place of files, terminals, and standard output that nobody reads."""

import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import teraplan.__main__
from teraplan import bounded_file
from teraplan.cli import main
from teraplan.files.plan_file import write_plan
from teraplan.files.trace_file import write_trace
from teraplan.library.machine_file import read_machine
from teraplan.library.machines import machine_named
from tests.cli.example_files import Captured, Files, assert_one_line, python
from tests.report.example_plan import make_plan


@contextmanager
def piped(path: str) -> Iterator[str]:
    """Name of a pipe through which the bytes of a file come, once."""
    reads, writes = os.pipe()

    def write() -> None:
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(Path(path).read_bytes())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield f"/dev/fd/{reads}"
    finally:
        os.close(reads)
        writer.join(20)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "PIPE"], 0),
        (["check", "PIPE"], 0),
        (["diff", "PIPE", "OTHER"], 1),
        (["simulate", "TRACE", "PIPE"], 0),
        (["timeline", "PIPE", "-o", "OUT.json"], 0),
        (["plot", "PIPE", "-o", "OUT.png"], 0),
    ],
    ids=lambda arguments: arguments[0] if isinstance(arguments, list) else "",
)
@pytest.mark.parametrize("kind", ["plan", "run"])
def test_plans_and_runs_come_through_pipes(
    arguments: list[str], code: int, kind: str, files: Files, capsys: Captured
) -> None:
    write_trace(make_plan().trace, files.out / "trace.json")
    names = {"OTHER": files.other, "TRACE": str(files.out / "trace.json")}
    with piped(getattr(files, kind)) as pipe:
        names["PIPE"] = pipe
        filled = [names.get(argument, argument) for argument in arguments]
        filled = [argument.replace("OUT", str(files.out / "out")) for argument in filled]
        assert main(filled) == code
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "show", "simulate"])
def test_devices_are_not_read(command: str, files: Files, capsys: Captured) -> None:
    arguments = [files.plan] if command == "simulate" else []
    assert main([command, *arguments, "/dev/zero"]) == 2
    assert_one_line(capsys, "" if arguments else "/dev/zero: is a device, not a file")


def test_a_pipe_that_nobody_writes_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(bounded_file, "WRITER_WAIT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with rescued(pipe):
        assert main(["check", str(pipe)]) == 2
    assert_one_line(capsys, f"{pipe}: is a pipe, and nobody writes to it")


@pytest.mark.parametrize(("comes_s", "writes_s"), [(0.3, 0.0), (0.0, 0.8)])
def test_who_writes_to_a_pipe_may_come_late_and_be_slow(
    comes_s: float, writes_s: float, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not written when the wait for a writer ends is waited for still."""
    monkeypatch.setattr(bounded_file, "WRITER_WAIT_S", 20.0 if comes_s else 0.4)
    pipe = files.out / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        time.sleep(comes_s)
        with pipe.open("wb") as file:
            time.sleep(writes_s)
            file.write(Path(files.plan).read_bytes())

    writer = threading.Thread(target=write)
    writer.start()
    assert main(["check", str(pipe)]) == 0
    writer.join(20)


@contextmanager
def rescued(pipe: Path) -> Iterator[None]:
    """A reader of the pipe that waits for a writer gets one after a while."""

    def write() -> None:
        if not done.wait(5):
            os.close(os.open(pipe, os.O_RDWR))

    done = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join(20)


def test_links_and_pipes_stay_what_they_are(files: Files) -> None:
    link, pipe = files.out / "link.json", files.out / "pipe"
    target = files.out / "target.json"
    target.write_text("{}")
    link.symlink_to(target)
    os.mkfifo(pipe)
    assert main(["hardware", "h200", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert read_machine(target) == machine_named("h200")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert main(["hardware", "h200", "-o", str(pipe)]) == 0
    reader.join(20)
    assert read == [target.read_bytes()]
    assert pipe.is_fifo()


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "PLAN", "--all"], 0),
        (["check", "PLAN"], 0),
        (["check", "BROKEN"], 1),
        (["diff", "PLAN", "OTHER"], 1),
        (["diff", "PLAN", "OTHER", "--json"], 1),
        (["diff", "--help"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_answer_is_the_same_if_nobody_reads_it(
    arguments: list[str], code: int, unbuffered: str, files: Files
) -> None:
    names = {"PLAN": files.plan, "BROKEN": files.broken, "OTHER": files.other}
    closed = "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)"
    filled = [names.get(argument, argument) for argument in arguments]
    main_of = f"import teraplan.cli as c; sys.exit(c.main({filled!r}))"
    done = python("-c", f"{closed}; {main_of}", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.slow
def test_nobody_listens(files: Files) -> None:
    """Standard output is closed, or its disk is full."""
    closed = f"import os, sys; os.close(1); sys.stdout = None; {_main_of(files)}"
    done = python("-c", closed)
    assert (done.returncode, done.stderr) == (0, b"")
    full = f"import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {_main_of(files)}"
    done = python("-c", full)
    assert done.returncode == 2
    assert done.stderr == b"teraplan check: No space left on device: output is lost\n"
    done = python("-c", full.replace("['check'", "['--help'"))
    assert done.returncode == 2
    assert done.stderr == b"teraplan: No space left on device: output is lost\n"


def _main_of(files: Files) -> str:
    return f"import teraplan.cli as c; sys.exit(c.main(['check', {files.plan!r}]))"


def test_an_output_goes_into_a_pipe_by_its_descriptor(files: Files) -> None:
    path = files.out / "trace.json"
    write_trace(make_plan().trace, path)
    arguments = ("plan", str(path), "--hardware", "h200:ssd=4", "-o", "/dev/stdout")
    done = python("-m", "teraplan", *arguments)
    assert done.returncode == 0, done.stderr
    assert b'"schema": "teraplan.plan"' in done.stdout


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for mode in (0o600, 0o644):
        write_plan(make_plan(), path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.chmod(0o644)


def test_on_a_terminal_a_plan_is_no_wider_than_that(
    files: Files, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["show", files.plan])
    whole = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    main(["show", files.plan])
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, whole)) > 60
    assert max(map(len, shown)) == 60
    for line, cut in zip(whole, shown, strict=True):
        assert cut == line if len(line) <= 60 else cut == f"{line[:59]}…"


class Interrupted:
    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_an_interrupt_of_the_imports_is_one_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "teraplan.cli", Interrupted())
    assert teraplan.__main__.main() == 130
