"""The program makes tensors on another device by default (`torch.set_default_device("cuda")`).

Here it is "meta": nobody gets by there who means the CPU and does not say so.
"""

from collections.abc import Iterator

import pytest
import torch

from teraplan import ops
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.engine.tokens import make_token
from teraplan.runtime.state.updates.sliced_update import _bits
from teraplan.runtime.storage import Storage, default_directory
from teraplan.values.hardware import Tier
from tests.runtime.cuda_world import LARGE, World, content_of


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


class _Owner:
    def release(self, key: int) -> None:
        pass


def test_tokens_are_on_the_cpu_and_traced_there() -> None:
    x = torch.zeros(4)
    traced = ops._fake_save(x, x, 0, [])
    _, token = make_token(_Owner())
    assert traced.device == token.device == torch.device("cpu")


@pytest.mark.parametrize("shift", [0, 16])
def test_what_comes_back_to_a_cpu(shift: int) -> None:
    device = CpuDevice(storage=Storage.open([default_directory()]), host_bytes=0)
    whole = bytearray(range(256)) * 4096
    tensor = torch.frombuffer(whole, dtype=torch.uint8, offset=shift)
    copy = device.start_out(tensor, Tier.STORAGE, "t")
    copy.wait_out()
    storage, offset, _ = device.start_back(copy, urgent=True).wait()
    assert storage.device == torch.device("cpu")
    found = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    assert torch.equal(found[offset : offset + copy.nbytes], tensor)
    made = device.empty((4, 5), (5, 1), torch.float32)
    assert made.device == torch.device("cpu")
    copy.drop()
    del found, storage
    device.close()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
def test_what_comes_back_to_a_gpu(tier: Tier) -> None:
    with World() as world:
        copy = world.moved(1, LARGE, tier)
        storage, offset, _ = world.device.start_back(copy).wait()
        world.cuda.finish()
        found = world.cuda.bytes_of(storage)
        assert torch.equal(found[offset : offset + LARGE], content_of(1, LARGE))
        assert world.device.empty((4, 5), (5, 1), torch.float32).device == world.cuda.device


def test_the_trial_of_an_update_in_slices_compares_numbers() -> None:
    parameter = torch.zeros(8, device="cpu")
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["step"] = 3
    assert [t.device.type for t in _bits(optimizer)] == ["cpu", "cpu"]
