"""What is said where saved activations are to leave and none can."""

from collections.abc import Iterator

import pytest

from teraplan.errors import BudgetExceededError, StorageError, StorageFullError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB


@pytest.fixture
def mover() -> Iterator[Mover]:
    """3 MiB are on the device, and nothing of them can leave."""
    device = CpuDevice(storage=Storage.open([default_directory()]), host_bytes=0)
    moving = Mover(device)
    moving.managed_bytes = 3 * MIB
    yield moving
    device.close()


FULL, FAILED = StorageFullError("the disk is full"), StorageError("the disk fails")


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [(FULL, "make room in storage"), (FAILED, "name another directory as storage")],
)
@pytest.mark.parametrize("nbytes", [0, MIB])
def test_a_fault_says_what_is_missing_and_what_helps(
    mover: Mover, fault: StorageError, remedy: str, nbytes: int
) -> None:
    mover.faults = [fault]
    with pytest.raises(type(fault)) as caught:
        mover.make_room(nbytes, 2 * MIB)
    coming = ", and 1.00 MiB more is needed now" if nbytes else ""
    assert str(caught.value) == (
        f"{fault}; saved activations take 3.00 MiB{coming}, where 2.00 MiB are left of "
        "device_budget, and none can leave: raise device_budget by "
        f"{2 if nbytes else 1}.00 MiB, or {remedy}"
    )


def test_without_a_fault_the_budget_is_what_helps(mover: Mover) -> None:
    mover.make_room(0, 2 * MIB)  # not strict: nothing was promised
    with pytest.raises(BudgetExceededError, match=r"raise device_budget by 1.00 MiB$"):
        mover.make_room(0, 2 * MIB, strict=True)
