"""What the machine can do: how much each tier holds and how fast each link is."""

from dataclasses import dataclass, replace
from enum import StrEnum


class Tier(StrEnum):
    """Where a tensor can be."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed between the device and another tier. `out` leaves the device, `back` comes to it."""

    out_bytes_per_s: int
    back_bytes_per_s: int
    out_while_back_bytes_per_s: int
    """Speed out while the other direction is busy too."""
    back_while_out_bytes_per_s: int
    latency_ns: int
    """Time that one transfer takes beside its bytes."""

    def times(self, factor: float) -> "Link":
        """The link with so many times its speed, and the same latency."""
        return replace(
            self,
            out_bytes_per_s=max(1, int(self.out_bytes_per_s * factor)),
            back_bytes_per_s=max(1, int(self.back_bytes_per_s * factor)),
            out_while_back_bytes_per_s=max(1, int(self.out_while_back_bytes_per_s * factor)),
            back_while_out_bytes_per_s=max(1, int(self.back_while_out_bytes_per_s * factor)),
        )

    def speeds(self, *, out: bool, back: bool) -> tuple[int, int]:
        """Bytes per second out and back, while each direction is busy or not."""
        return (
            self.out_while_back_bytes_per_s if back else self.out_bytes_per_s,
            self.back_while_out_bytes_per_s if out else self.back_bytes_per_s,
        )

    def at_most(self, pace: "Link") -> "Link":
        """The link, driven no faster than `pace` is; the latency stays."""
        return replace(
            self,
            out_bytes_per_s=min(self.out_bytes_per_s, pace.out_bytes_per_s),
            back_bytes_per_s=min(self.back_bytes_per_s, pace.back_bytes_per_s),
            out_while_back_bytes_per_s=min(
                self.out_while_back_bytes_per_s, pace.out_while_back_bytes_per_s
            ),
            back_while_out_bytes_per_s=min(
                self.back_while_out_bytes_per_s, pace.back_while_out_bytes_per_s
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCores:
    """How fast the host's cores update parameters."""

    update_bytes_per_s: int
    """Bytes of gradients, parameters and state that an update reads and writes there in a second
    (`Update.work_bytes`)."""
    memory_bytes_per_s: int
    """What host memory carries: updates and copies over the host link share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine as planning sees it."""

    device: str
    device_capacity_bytes: int
    host_capacity_bytes: int
    storage_capacity_bytes: int
    host_link: Link | None
    """None: there is no host tier beside the device (a CPU device is host memory itself)."""
    storage_link: Link | None
    device_port: Link | None = None
    """What all traffic of the device has to share, e.g. its PCIe slot; None: the links do not
    disturb each other. Its latency counts nothing."""
    host_cores: HostCores | None = None
    """None: updates run on the device alone."""
    staging_bytes: int = 0
    """Of the host budget, what bytes on their way between device and storage pass through; 0: they
    go straight (GPUDirect Storage), or that memory is not counted in the host budget."""

    @property
    def holds_staging(self) -> bool:
        """Whether host memory is as large as what passes through it."""
        return self.staging_bytes <= self.host_capacity_bytes

    def host_room_bytes(self, budget_bytes: int) -> int:
        """What tensors may take of a host budget; negative if it does not hold the staging."""
        return min(budget_bytes, self.host_capacity_bytes) - self.staging_bytes

    def with_links(self, factor: float) -> "Hardware":
        """The machine with links to host memory and storage of so many times their speed."""
        return replace(
            self,
            host_link=self.host_link.times(factor) if self.host_link else None,
            storage_link=self.storage_link.times(factor) if self.storage_link else None,
        )

    def paced(self, storage: Link | None) -> "Hardware":
        """The machine with its storage driven no faster than `storage`; None is no limit."""
        if storage is None or self.storage_link is None:
            return self
        return replace(self, storage_link=self.storage_link.at_most(storage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The most bytes that a plan may use of each tier."""

    device_bytes: int
    host_bytes: int
    storage_bytes: int
