"""One tensor of the training state: a place in memory that its bytes may leave and come back to."""

from dataclasses import dataclass
from enum import StrEnum

from teraplan.runtime.storage import Record, Transfer
from teraplan.step_trace import TensorKind

Key = tuple[TensorKind, int]
"""What a step uses: the same in every step, also where the tensor is another one each time."""


class Place(StrEnum):
    """Where the bytes of a block are."""

    MEMORY = "memory"
    COMING = "coming"
    """In storage; a read into other pages is under way."""
    STORAGE = "storage"


@dataclass(slots=True, eq=False)
class Block:
    """`nbytes` (whole pages) at `address`.

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
    arrival: Transfer | None = None
    landing: int = 0
    """Address of the pages that the read goes to."""
    position: int | None = None
    """Of its latest use in the step before."""

    spent: bool = False
    """A gradient whose parameter has been updated: nothing but user code may still want it."""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.what} {self.key[1]} ({'x'.join(map(str, self.shape))})"

    @property
    def held(self) -> bool:
        """True if it takes memory."""
        return self.place is not Place.STORAGE
