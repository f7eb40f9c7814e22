"""A training run whose disk fails in the middle: equal bits, or an error that names everything."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from teraplan.errors import FallbackRefusedError, InfeasibleBudgetError, StorageFullError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.device import Copy
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.session.case import Case
from teraplan.runtime.storage import Storage
from teraplan.runtime.storage.workers import WORKERS, Workers
from teraplan.values.hardware import Tier
from tests.end_to_end.training import MLP, Run, assert_same, run, tight, training, unlimited
from tests.fakes.faulty_calls import Fault, injected

pytestmark = pytest.mark.slow

FOREVER = 10**9
ONE_FAILS = 2
"""So many failing calls in a row of one worker: its second try fails, too."""
PROGRAM = training(lambda: MLP(rows=8192), MLP(rows=8192).batch, steps=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The program with memory for everything, and budgets under which tensors have to leave."""

    unlimited: Run
    wide_bytes: int
    narrow_bytes: int


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    best = unlimited(PROGRAM)
    wide, narrow = (_budget_bytes(tight(PROGRAM, best, part)) for part in (0.95, 0.5))
    return Reference(unlimited=best, wide_bytes=wide, narrow_bytes=narrow)


def _budget_bytes(limited: Run) -> int:
    """The run's budget, and something for measurements that differ from run to run."""
    budget = limited.options["device_budget"]
    assert isinstance(budget, int)
    return budget + budget // 8


@pytest.mark.slow
def test_tensors_that_cannot_leave_stay_where_there_is_room(reference: Reference) -> None:
    # Room for one file's first growth, and none after that.
    with injected(Fault(call="grow", what=errno.ENOSPC, at=2, times=FOREVER)) as calls:
        limited = run(PROGRAM, device_budget=reference.wide_bytes)
    assert calls.counts["write"] > 0
    assert_same(reference.unlimited, limited)


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, each could fail with a tensor of its own, and there is room for one."""
    defaults = Storage.open.__func__.__kwdefaults__  # type: ignore[attr-defined]
    assert defaults is not None
    monkeypatch.setitem(defaults, "workers", Workers(WORKERS.always[:1]))


@pytest.mark.usefixtures("one_worker")
def test_one_failed_write_changes_no_bit_and_is_told(reference: Reference) -> None:
    with injected(Fault(call="write", what=errno.EIO, at=4, times=ONE_FAILS)) as calls:
        limited = run(PROGRAM, device_budget=reference.narrow_bytes)
    assert calls.num_injected == ONE_FAILS
    assert_same(reference.unlimited, limited)
    told = "\n".join(limited.statuses[-1].fallbacks)
    assert "could not leave the device, and stayed" in told
    assert "EIO: Input/output error" in told


@pytest.mark.slow
def test_host_memory_takes_what_storage_cannot(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_by: list[Tier] = []
    start_out = CpuDevice.start_out

    def noted(
        self: CpuDevice, tensor: torch.Tensor, tier: Tier, label: str, *, host_bytes: int = 0
    ) -> Copy:
        copy = start_out(self, tensor, tier, label, host_bytes=host_bytes)
        taken_by.append(tier)
        return copy

    monkeypatch.setattr(CpuDevice, "start_out", noted)
    # A new plan would use host memory anyway; this one was made without it.
    tight(PROGRAM, reference.unlimited, 0.5, report=str(tmp_path))
    with injected(Fault(call="write", what=errno.EIO, at=8, times=FOREVER)) as calls:
        limited = run(PROGRAM, plan=str(tmp_path / "plan.json"), host_budget="1GiB")
    assert calls.num_injected > 0
    assert_same(reference.unlimited, limited)
    assert Tier.HOST in taken_by


def test_a_full_disk_and_no_room_is_an_error_that_says_both(reference: Reference) -> None:
    with (
        injected(Fault(call="grow", what=errno.ENOSPC, at=1, times=FOREVER)),
        pytest.raises(
            StorageFullError,
            match=r"needs .* in .*No space left on device.*; saved activations take .* where .* "
            r"are left of device_budget.*make room in storage",
        ),
    ):
        run(PROGRAM, device_budget=reference.narrow_bytes)


def test_a_plan_that_no_longer_fits_says_that_storage_has_failed(reference: Reference) -> None:
    with (
        injected(Fault(call="write", what=errno.EIO, at=8, times=FOREVER)),
        pytest.raises(
            (InfeasibleBudgetError, OSError), match=r"device_budget|device budget.*EIO"
        ) as caught,
    ):
        run(PROGRAM, device_budget=reference.narrow_bytes * 7 // 8)
    assert "EIO" in str(caught.value)


@pytest.mark.usefixtures("one_worker")
def test_strict_refuses_to_go_on_after_a_fault(reference: Reference) -> None:
    with (
        injected(Fault(call="write", what=errno.EIO, at=4, times=ONE_FAILS)),
        pytest.raises(FallbackRefusedError, match=r"strict is set, and .* could not leave"),
    ):
        run(PROGRAM, device_budget=reference.narrow_bytes, strict=True)


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("failing", [(2,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_steps_with_faults_are_not_measured_unless_all_are(
    reference: Reference, failing: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not leave stayed, so that they took more than others do."""
    measured: list[int] = []
    add = Case.add

    def noted(self: Case, recorder: StepRecorder) -> None:
        measured.append(steps[-1])
        add(self, recorder)

    monkeypatch.setattr(Case, "add", noted)
    steps, num_injected = list[int](), list[int]()

    def program(this: Run) -> None:
        net = MLP(rows=8192)
        this.compile(net)
        for step in range(10):
            faults = [Fault(call="write", what=errno.EIO, at=1, times=ONE_FAILS)]
            with injected(*faults * (step in failing)) as calls:
                loss = net(*net.batch(step))
                steps.append(step)  # until the next one begins
                torch.autograd.backward(loss)
            num_injected.append(calls.num_injected)

    run(program, device_budget=reference.narrow_bytes, profile_steps=2)
    assert num_injected[2] == ONE_FAILS
    assert measured, "where all have faults, three are left out"
    assert not set(measured) & set(failing[:3])
