"""What tensors take that lasts, counted as seldom as a training needs that goes on in the same way.

To count is to walk over every object of the process, which takes a tenth of a second where there is
a compiler in it: more than a small step.
"""

from collections.abc import Iterable

from teraplan.runtime.device import Device
from teraplan.runtime.process import census

_AT_EACH_STEP = 8
"""So many counts are made at once; from then on with twice as many steps between them each time."""
_MOST_STEPS = 64
"""Between two counts."""
_GROWN_BYTES, _GROWN_FRACTION = 8 << 20, 1 / 16
"""What the process holds has grown by so much: something that lasts may be new."""


class StateCount:
    """Of one device, since its session began or began anew."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.state_bytes = 0
        """Of all tensors on the device."""
        self.gradients_bytes = self.optimizer_bytes = 0
        """Of gradients and optimizer state, what does not exist yet."""
        self.overhead_bytes: int | None = None
        """What the process holds beside tensors; None as long as that is compilers' leftovers."""
        self._graphs: set[str] = set()
        """Those that there were: another may use parameters that were not counted."""
        self._below: int | None = None
        self._num_counts = self._next_step = self._resident_bytes = 0

    def refresh(self, graphs: Iterable[str], *, below: int | None, step: int | None) -> bool:
        """Count at the beginning of a step if it is time to; true if it was.

        Args:
            graphs: names of those that such steps run.
            below: of gradients and optimizer state, count those of smaller parameters alone.
            step: its number; None: it is time.
        """
        resident_bytes = self._device.resident_bytes()
        if step is not None and not self._is_due(graphs, below, step, resident_bytes):
            return False
        self.state_bytes, overhead_bytes = self._device.tensors_and_overhead()
        self._resident_bytes = self.state_bytes + overhead_bytes
        if self._num_counts > 0:
            self.overhead_bytes = overhead_bytes
        self._count_missing(below)
        self._graphs.update(graphs)
        self._num_counts += 1
        doubled = max(0, self._num_counts - _AT_EACH_STEP)
        self._next_step = (step or 0) + min(_MOST_STEPS, 1 << doubled)
        return True

    def meet(self, graph: str, *, below: int | None) -> None:
        """A graph is about to run in the middle of a step: what lasts cannot be counted there."""
        if graph not in self._graphs or below != self._below:
            self._graphs.add(graph)
            self._count_missing(below)

    def _is_due(
        self, graphs: Iterable[str], below: int | None, step: int, resident_bytes: int
    ) -> bool:
        grown_bytes = max(_GROWN_BYTES, int(self._resident_bytes * _GROWN_FRACTION))
        has_grown = resident_bytes > self._resident_bytes + grown_bytes
        is_other = below != self._below or not self._graphs.issuperset(graphs)
        return is_other or has_grown or step >= self._next_step

    def _count_missing(self, below: int | None) -> None:
        self._below = below
        missing = census.missing_nbytes(self._device.type, below=below)
        self.gradients_bytes, self.optimizer_bytes = missing
