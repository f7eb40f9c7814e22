"""The device back end for the tensors of a graph."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from teraplan.config import Config
from teraplan.errors import ConfigError, UnsupportedError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.device import Device
from teraplan.runtime.process import process_memory
from teraplan.runtime.storage import Storage, default_directory

_PINNED_SHARE = 0.5
"""Share of the available host memory that the GPUs of a training take if no host budget is given:
pinned memory cannot be swapped, and the rest of the machine needs some."""
_NUM_PROCESSES = "LOCAL_WORLD_SIZE"
"""Variable in which torchrun says how many processes of a training share this machine."""


def with_index(device: torch.device) -> torch.device:
    """`device` itself, the current one of its type if it does not say which."""
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def open_device(config: Config, place: torch.device) -> Device:
    """The back end for tensors at `place` with spill files as `config` says.

    Raises:
        UnsupportedError: there is no back end for that type.
        StorageUnusableError, FallbackRefusedError: a storage directory cannot be used.
        ConfigError: with how many others the host memory is to be shared cannot be told.
    """
    if place.type not in _OPENERS:
        raise UnsupportedError(
            f"there is no back end for device type {place.type!r}; move the model to "
            + " or ".join(repr(known) for known in _OPENERS)
        )
    directories = [Path(d) for d in config.storage] or [default_directory()]
    storage = Storage.open(
        directories,
        checksum=config.checksum,
        deadline_s=config.deadline_s,
        strict=config.strict,
        device_memory=place.type != "cpu",
        encrypt=config.encrypt,
        without_python=place.type == "cpu",
    )
    try:
        return _OPENERS[place.type](config, place, storage)
    except BaseException:
        storage.close()
        raise


def _open_cpu(config: Config, _: torch.device, storage: Storage) -> Device:
    device = CpuDevice(
        storage=storage, host_bytes=_host_bytes(config, share=0.0), strict=config.strict
    )
    if config.host_budget is not None and config.host_budget.nbytes is None:
        device.limit_host(0)
    return device


def _open_cuda(config: Config, place: torch.device, storage: Storage) -> Device:
    from teraplan.runtime.cuda.device import CudaDevice
    from teraplan.runtime.cuda.torch_runtime import TorchCuda

    return CudaDevice(
        TorchCuda(place.index),
        storage,
        host_bytes=_host_bytes(config, share=_PINNED_SHARE / _num_processes()),
        deadline_s=config.deadline_s,
        strict=config.strict,
    )


def _host_bytes(config: Config, *, share: float) -> int:
    available = process_memory.available_bytes()
    if config.host_budget is None:
        return int(available * share)
    if config.host_budget.nbytes is None:  # of the step's peak, which only the plan will know
        return available
    return config.host_budget.nbytes


def _num_processes() -> int:
    """Of this training on this machine."""
    text = os.environ.get(_NUM_PROCESSES) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"environment variable {_NUM_PROCESSES}: {text!r} is not a number of processes, by "
            "which host memory could be divided; unset it, or start them with torchrun, which sets "
            "it to 1 or more"
        )
    return int(text)


_OPENERS: Mapping[str, Callable[[Config, torch.device, Storage], Device]] = {
    "cpu": _open_cpu,
    "cuda": _open_cuda,
}
