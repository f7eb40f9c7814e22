"""What a device is opened with."""

import pytest
import torch

from teraplan.config import Config
from teraplan.errors import ConfigError
from teraplan.runtime.cuda import torch_runtime
from teraplan.runtime.cuda.device import CudaDevice
from teraplan.runtime.open_device import open_device
from teraplan.runtime.process import process_memory
from teraplan.units import MIB
from tests.fakes.fake_cuda import FakeCuda


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a machine with 128 MiB of free memory."""
    monkeypatch.setattr(torch_runtime, "TorchCuda", lambda _: FakeCuda())
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 128 * MIB)


def host_bytes_of_a_gpu() -> int:
    device = open_device(Config.resolve({}, {}), torch.device("cuda", 0))
    assert isinstance(device, CudaDevice)
    found = sum(pool.limit_bytes for pool in device._pools())
    device.close()
    assert isinstance(device.cuda, FakeCuda)
    device.cuda.close()
    return found


@pytest.mark.parametrize(
    ("num_processes", "host_bytes"),
    [(None, 64 * MIB), ("", 64 * MIB), ("1", 64 * MIB), ("4", 16 * MIB)],
)
def test_processes_of_one_machine_share_half_of_its_memory(
    num_processes: str | None, host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if num_processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_processes)
    assert host_bytes_of_a_gpu() == host_bytes


@pytest.mark.parametrize("num_processes", ["0", "-2", "two", "1.5"])
def test_a_wrong_number_of_processes_is_refused(
    num_processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_processes)
    with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE: '{num_processes}' is not a number"):
        host_bytes_of_a_gpu()
