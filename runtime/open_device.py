"""The device back end for the tensors of a graph."""

from pathlib import Path

from teraplan.config import Config
from teraplan.errors import UnsupportedError
from teraplan.runtime import process_memory
from teraplan.runtime.cpu_device import CpuDevice
from teraplan.runtime.device import Device
from teraplan.runtime.storage import Storage, default_directory


def open_device(config: Config, device_type: str) -> Device:
    """The back end for `device_type` with spill files as `config` says.

    Raises:
        UnsupportedError: there is no back end for that type.
        StorageUnusableError, FallbackRefusedError: a storage directory cannot be used.
    """
    directories = [Path(d) for d in config.storage] or [default_directory()]
    storage = Storage.open(
        directories,
        checksum=config.checksum,
        deadline_s=config.deadline_s,
        strict=config.strict,
    )
    if device_type == "cpu":
        host = config.host_budget
        host_bytes = 0
        if host is not None:
            host_bytes = host.resolve(process_memory.available_bytes())
        return CpuDevice(storage=storage, host_bytes=host_bytes)
    storage.close()
    raise UnsupportedError(
        f"there is no back end for device type {device_type!r}; move the model to 'cpu' or 'cuda'"
    )
