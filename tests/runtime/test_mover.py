"""What is said where saved activations are to leave and none can."""

from collections.abc import Iterator

import pytest
import torch

from teraplan.errors import BudgetExceededError, StorageError, StorageFullError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from teraplan.values.hardware import Tier


@pytest.fixture
def mover() -> Iterator[Mover]:
    """3 MiB are on the device, and nothing of them can leave."""
    device = CpuDevice(storage=Storage.open([default_directory()]), host_bytes=4 * MIB)
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


@pytest.mark.parametrize("clean", [False, True])
def test_what_leaves_again_is_written_only_if_the_plan_does_not_rely_on_the_copy(
    mover: Mover, *, clean: bool
) -> None:
    x = torch.arange(MIB, dtype=torch.int32)
    version = x._version
    saved = Saved("x", x.nbytes, 0, x, version, order=0, saved_version=version, saved_by=0)
    saved.tokens = 1
    mover.add(saved)
    tiers = []
    for tier in (Tier.STORAGE, Tier.HOST):
        mover.start_leaving(saved, tier, clean=clean)
        assert saved.copy is not None
        tiers.append(saved.copy.tier)
        mover.finish_leaving(saved)
        assert not saved.resident
        mover.start_back(saved)
        mover.finish_back(saved)
        assert saved.tensor is not None
        assert torch.equal(saved.tensor.view(torch.int32), x)
    assert tiers == [Tier.STORAGE, Tier.STORAGE if clean else Tier.HOST]
