"""Every mistake is an error of ours, raised from the call that the user made."""

import gc
import os
import re
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from teraplan import backend
from teraplan.errors import (
    ConfigError,
    FallbackRefusedError,
    FileFormatError,
    InfeasibleBudgetError,
    InvalidPlanError,
    PlanMismatchError,
    StorageFullError,
    StorageUnusableError,
    TeraplanError,
    UnsupportedError,
)
from teraplan.files.plan_file import read_plan, write_plan
from teraplan.simulation.simulate import predict
from teraplan.values.hardware import Tier
from tests.end_to_end.conftest import forget_everything
from tests.end_to_end.training import MLP, UNLIMITED, Run, assert_same, run, training, unlimited
from tests.fakes.slow_link import link_of
from tests.planning.test_host_updates import hosted

QUICK = {"kernels": "aot_eager", "profile_steps": 1}
_MOST_FRAMES = 6
"""Frames of ours in a traceback that a user gets to see."""


def call(options: dict[str, object], *, mode: str | None = None) -> None:
    """The first call of a model under these options."""
    model = MLP()
    model.compile(backend="teraplan", options={**QUICK, **options} if options else None, mode=mode)
    model(*MLP().batch(0))


def test_a_disk_without_room_for_the_speed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is compiled: as what it is, not as a failure of the compiler."""

    def full(*_: object, **__: object) -> None:
        raise StorageFullError("speed probe 0: needs 16.00 MiB, where 4.00 MiB are free")

    monkeypatch.setattr("teraplan.runtime.links.storage_link", full)
    with pytest.raises(StorageFullError, match="speed probe 0"):
        call({"device_budget": "64MiB", "training_state": "moves"})


def ours(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of our code that a traceback shows."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if re.search(r"/(teraplan|passes|runtime)/\w+\.py$", f.filename)]


def test_a_plan_with_updates_on_the_host_is_refused(tmp_path: Path) -> None:
    write_plan(hosted(), tmp_path / "plan.json")
    with pytest.raises(UnsupportedError, match=r"plan.json: 1 updates run on the host's cores"):
        call({"plan": str(tmp_path / "plan.json")})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device_budgte": "1GiB"}, ConfigError, "did you mean device_budget"),
        ({"device_budget": "lots"}, ConfigError, "option device_budget"),
        ({"policy": "none_such"}, ConfigError, "none_such"),
        ({"storage": "/no/such/directory"}, StorageUnusableError, "/no/such/directory"),
        ({"plan": "/no/such/plan.json"}, FileFormatError, "/no/such/plan.json"),
        ({"report": "/dev/null/report"}, ConfigError, "/dev/null/report: Not a directory"),
    ],
)
def test_wrong_option(options: dict[str, object], error: type[TeraplanError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call(options)
    assert type(caught.value) is error
    assert len(ours(caught.value)) <= _MOST_FRAMES
    assert caught.value.__cause__ is None


def test_storage_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnusableError, match="file"):
        call({"storage": str(tmp_path / "file")})


@pytest.mark.parametrize("strict", [False, True])
def test_a_report_that_cannot_be_written_any_more(tmp_path: Path, strict: bool) -> None:
    def losing(this: Run) -> None:
        net = this.compile(MLP())
        for step in range(6):
            loss = net(*MLP().batch(step))
            torch.autograd.backward(loss)
            this.record(loss, net)
            if step == 0:
                (tmp_path / "report").rmdir()

    options: dict[str, object] = {"report": str(tmp_path / "report"), "strict": strict}
    if strict:
        with pytest.raises(FallbackRefusedError, match=r"trace.json cannot be written: No such"):
            run(losing, device_budget=UNLIMITED, **options)
        return
    limited = run(losing, device_budget=UNLIMITED, **options)
    fallbacks = limited.final.fallbacks
    assert [text.split("/")[-1] for text in fallbacks if "written" in text] == [
        f"{what}.json cannot be written: No such file or directory"
        for what in ("trace", "plan", "run")
    ]


def test_mode_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match="has no meaning"):
        call({}, mode="max-autotune")


def test_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAPLAN_DEVICE_BUGDET", "1GiB")
    with pytest.raises(ConfigError, match="TERAPLAN_DEVICE_BUDGET"):
        call({"deadline_s": 62})


def test_an_error_does_not_stick_to_what_is_corrected() -> None:
    """The model that failed can be freed, and another try with a right option works."""
    for _ in range(2):
        with pytest.raises(ConfigError):
            call({"device_budget": "lots"})
    forget_everything()
    call({"device_budget": UNLIMITED})


def test_a_model_is_freed_after_a_wrong_option() -> None:
    """Else its memory stays, and counts as the next model's."""

    def fail() -> "weakref.ref[MLP]":
        model = MLP()
        model.compile(backend="teraplan", options={"device_budget": "lots"})
        with pytest.raises(ConfigError):
            model(*MLP().batch(0))
        return weakref.ref(model)

    model = fail()
    torch._dynamo.reset()
    gc.collect()
    assert model() is None


def descriptors() -> set[str]:
    """What this process has open, by name."""
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        with_target = os.readlink(entry) if entry.is_symlink() else ""
        names.add(f"{entry.name} {with_target}")
    return {name for name in names if "/proc/" not in name}


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_is_gone_leaves_no_session_and_no_file(disk: Path, fails: bool) -> None:
    before = descriptors()
    budget = 200_000 if fails else UNLIMITED

    def use() -> None:
        training(MLP, MLP().batch, steps=2)(
            Run({**QUICK, "device_budget": budget, "storage": disk})
        )

    if fails:
        with pytest.raises(InfeasibleBudgetError):
            use()
    else:
        use()
        assert any(str(disk) in name for name in descriptors() - before)
    torch._dynamo.reset()
    gc.collect()
    assert not backend.sessions()
    assert not [name for name in descriptors() - before if str(disk) in name]
    assert not list(disk.iterdir())


def test_hopeless_budget_fails_at_the_first_call_and_names_one_that_works() -> None:
    calls = 0

    def counting(this: Run) -> None:
        nonlocal calls
        model = this.compile(MLP())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            calls += 1
            model(*MLP().batch(step))
            optimizer.step()

    with pytest.raises(InfeasibleBudgetError, match="set device_budget to") as caught:
        run(counting, device_budget=250_000)
    assert calls == 1
    assert len(ours(caught.value)) <= _MOST_FRAMES
    least = caught.value.least_budget_bytes
    del caught
    assert least > 250_000
    run(training(MLP, MLP().batch, steps=5), device_budget=int(least * 1.05))


def _with_number(name: str, value: int) -> Callable[[str], str]:
    """Sets the first field of this name in a JSON text."""
    return lambda text: re.sub(rf'"{name}": ?\d+', f'"{name}": {value}', text, count=1)


def test_hopeless_budget_of_a_graph_without_ops() -> None:
    """Nothing saved is large enough for an op; the budget counts all the same."""
    model = MLP()
    model.compile(backend="teraplan", options={**QUICK, "device_budget": "1KiB"})
    with pytest.raises(InfeasibleBudgetError, match="parameters, gradients, optimizer state"):
        model(MLP().batch(0)[0][:1])


class TestPlanFiles:
    """What report= wrote is replayed by plan=, and nothing else is."""

    @pytest.fixture(scope="class")
    @staticmethod
    def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
        """A plan that moves something, and the run that it was made in."""
        from tests.end_to_end.training import assert_kept_to_plan, moving

        directory = tmp_path_factory.mktemp("report")
        torch.set_num_threads(1)
        program = training(MLP, MLP().batch)
        limited = moving(program, unlimited(program), 0.5, report=str(directory))
        assert_kept_to_plan(limited)
        return directory / "plan.json", limited

    def test_replay_has_the_same_bits_and_moves_the_same(self, recorded: tuple[Path, Run]) -> None:
        path, original = recorded
        replayed = run(training(MLP, MLP().batch), plan=str(path))
        assert_same(original, replayed)
        assert replayed.moved_bytes == read_plan(path).prediction.out_bytes[Tier.STORAGE]

    def test_replay_keeps_to_the_budget_of_the_plan_before_it_is_in_force(
        self, recorded: tuple[Path, Run]
    ) -> None:
        path, _ = recorded
        first = run(training(MLP, MLP().batch, steps=1), plan=str(path)).statuses[0]
        assert first.phase != "planned"
        assert first.device_budget_bytes == read_plan(path).budgets.device_bytes

    def test_replay_drives_storage_no_faster_than_the_plan_says(
        self, recorded: tuple[Path, Run], tmp_path: Path
    ) -> None:
        plan = read_plan(recorded[0])
        pace = link_of(32 << 20)
        slow = replace(plan, storage_pace=pace)
        slow = replace(slow, prediction=predict(slow.trace, slow.machine, *slow.choices))
        write_plan(slow, tmp_path / "plan.json")
        replayed = run(training(MLP, MLP().batch), plan=str(tmp_path / "plan.json"))
        assert_same(recorded[1], replayed)
        assert slow.prediction.step_ns > 2 * plan.prediction.step_ns
        assert replayed.final.actual_step_ns >= slow.prediction.step_ns / 2

    def test_replay_in_less_memory_than_the_plan_takes_is_refused(
        self, recorded: tuple[Path, Run]
    ) -> None:
        path = recorded[0]
        plan = read_plan(path)
        peak = plan.prediction.device_peak_bytes
        for budget in (peak // 2, "1%"):
            with pytest.raises(PlanMismatchError, match=r"takes .* and device_budget is") as caught:
                call({"plan": str(path), "device_budget": budget})
            assert str(path) in str(caught.value)
        replayed = run(training(MLP, MLP().batch), plan=str(path), device_budget=2 * peak)
        assert_same(recorded[1], replayed)
        last = replayed.statuses[-1]
        assert last.device_budget_bytes == plan.budgets.device_bytes, (
            "it is replayed as it was made"
        )

    def test_replay_for_another_model_is_refused(self, recorded: tuple[Path, Run]) -> None:
        def other() -> MLP:
            return MLP(depth=5)

        path = re.escape(str(recorded[0]))
        with pytest.raises(PlanMismatchError, match=f"^{path}: .*graph"):
            run(training(other, MLP().batch, steps=6), plan=str(recorded[0]))

    def test_replay_with_a_tensor_of_another_size_is_refused(
        self, recorded: tuple[Path, Run], tmp_path: Path
    ) -> None:
        """A person may have edited it; it is no plan for the tensors that there are."""
        plan = read_plan(recorded[0])
        tensors, number = list(plan.trace.tensors), plan.migrations[0].tensor_id
        moved = tensors[number]
        tensors[number] = replace(moved, nbytes=moved.nbytes // 2)
        trace = replace(plan.trace, tensors=tuple(tensors))
        write_plan(replace(plan, trace=trace), path := tmp_path / "plan.json")
        with pytest.raises(PlanMismatchError, match=f"{moved.name} has .* in the plan and .* here"):
            run(training(MLP, MLP().batch, steps=6), plan=str(path))

    def test_replay_for_another_size_is_refused(self, recorded: tuple[Path, Run]) -> None:
        with pytest.raises(PlanMismatchError, match=r"graphs is|has .* in the plan and .* here"):
            run(training(MLP, MLP(rows=640).batch, steps=6), plan=str(recorded[0]))

    @pytest.mark.parametrize(
        ("damage", "error", "match"),
        [
            (lambda text: text[: len(text) // 2], FileFormatError, "JSON"),
            (lambda _: "", FileFormatError, "JSON"),
            (lambda _: '{"schema_version": 1}', FileFormatError, 'schema" is missing'),
            (lambda _: "\x00\xff\x00", FileFormatError, "JSON"),
            (_with_number("gone", 0), InvalidPlanError, "leave <= gone"),
            (_with_number("device_bytes", 1000), InvalidPlanError, "over the limit of 1000 B"),
            (_with_number("chunk_bytes", 1 << 50), InvalidPlanError, "chunk_bytes is 1024.00 TiB"),
            (_with_number("schema_version", 999), FileFormatError, "999"),
        ],
    )
    def test_damaged_plan_is_refused(
        self,
        recorded: tuple[Path, Run],
        tmp_path: Path,
        damage: Callable[[str], str],
        error: type[FileFormatError],
        match: str,
    ) -> None:
        text = recorded[0].read_text()
        path = tmp_path / "plan.json"
        path.write_text(damage(text))
        assert path.read_text() != text
        with pytest.raises(error, match=match) as caught:
            call({"plan": str(path)})
        assert str(path) in str(caught.value)
