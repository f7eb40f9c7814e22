"""One or more tensors of the training state: memory that their bytes may leave and come back to."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from teraplan.values.step_trace import TensorKind

Key = tuple[TensorKind, int]
"""What a step uses: the same in every step, also where the tensor is another one each time."""


class Record(Protocol):
    """The bytes of a block below the device, or on their way there."""

    @property
    def done(self) -> bool:
        """True if none is under way, whether or not it went well."""
        ...

    @property
    def failed(self) -> bool:
        """True if some of them did not get there. It may be so before all others are `done`."""
        ...

    @property
    def takes_host(self) -> bool:
        """True if some of it lies in host memory."""
        ...


class Arrival(Protocol):
    """The bytes of a block on their way back."""

    @property
    def done(self) -> bool:
        """True if none is under way, whether or not it went well."""
        ...


class Place(StrEnum):
    """Where the bytes of a block are."""

    MEMORY = "memory"
    COMING = "coming"
    """Away; a read into other memory is under way."""
    AWAY = "away"
    """In host memory or storage."""


@dataclass(slots=True, eq=False)
class Block:
    """`nbytes` at `address`, which on a CPU stays the same.

    In `MEMORY` there may be a `record` besides, and the bytes may be on their way out to it.
    """

    key: Key
    what: str
    """What it is: "parameter", "gradient", or what the optimizer calls it."""
    shape: tuple[int, ...]
    dtype: str
    address: int
    nbytes: int
    place: Place = Place.MEMORY
    record: Record | None = None
    digest: int = 0
    """Of the bytes that the record was made of."""
    changed: bool = True
    """The record, if there is one, is known not to hold these bytes."""
    leaving: bool = False
    """To be taken out of memory as soon as the record is written."""
    touched: bool = False
    """Away, and something has been read or written where the file is shown."""
    uses: int = 0
    """Uses under way: it must stay in memory."""
    epoch: int = 0
    """When the record was made, or the read begun."""
    arrival: Arrival | None = None
    landing: int = 0
    """Address of the memory that the read goes to, or that is about to be given back; else 0."""
    position: int | None = None
    """Of its latest use in the step before."""

    num_tensors: int = 0
    """That have their memory here."""
    is_open: bool = False
    """More tensors may come, so it stays when it has none."""
    filled_bytes: int = 0
    """From its beginning, what tensors have or have had."""
    num_spent: int = 0
    """Gradients whose parameters have been updated."""

    @property
    def spent(self) -> bool:
        """Gradients that nothing but user code may still want."""
        return self.num_spent >= self.num_tensors > 0 and not self.is_open

    @property
    def label(self) -> str:
        """For people."""
        of_one = "x".join(map(str, self.shape))
        contents = of_one if self.num_tensors <= 1 else f"{self.num_tensors} small tensors"
        return f"{self.what} {self.key[1]} ({contents})"

    @property
    def held(self) -> bool:
        """True if it takes memory."""
        return self.place is not Place.AWAY
