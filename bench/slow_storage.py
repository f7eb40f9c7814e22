"""Storage as slow as a benchmark wants: real files behind a limit of bandwidth."""

from teraplan import backend
from teraplan.config import Config
from teraplan.hardware import Link
from teraplan.runtime import links
from teraplan.runtime.device import Device
from teraplan.runtime.open_device import open_device
from tests.fakes.slow_link import link_of
from tests.fakes.throttled_stores import throttle


def slow_down_storage(bytes_per_s: int) -> None:
    """Let the storage of this process's sessions carry so much, and be taken for such."""

    def slow_device(config: Config, device_type: str) -> Device:
        device = open_device(config, device_type)
        stores = device.storage.traffic.stores
        throttle(device.storage, [bytes_per_s / len(stores)] * len(stores))
        return device

    def storage_link(*_: object, **__: object) -> Link:
        return link_of(bytes_per_s)

    setattr(backend, "open_device", slow_device)  # noqa: B010  type checkers: no such export
    links.storage_link = storage_link
