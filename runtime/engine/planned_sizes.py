"""Whether saved activations are as large as planned: sizes may follow from values."""

from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.engine.schedule import Schedule


class PlannedSizes:
    """Of one step."""

    def __init__(self) -> None:
        self.any_larger = False
        """The plan is kept to as far as possible."""
        self._excess_bytes = 0
        """By which all so far are larger than planned."""

    def compare(self, saved: Saved, schedule: Schedule) -> int | None:
        """By how much more the kernels take than planned, if the plan is to be left; else None.

        It is where all are larger by more than what is bearable: in proportion to the tensor that
        is just saved.
        """
        planned_bytes = schedule.sizes_bytes[saved.order]
        self.any_larger |= saved.nbytes > planned_bytes
        if saved.tokens > 1:  # it has been compared
            return None
        self._excess_bytes += saved.nbytes - planned_bytes
        if saved.nbytes <= planned_bytes or self._excess_bytes <= schedule.bearable_bytes:
            return None
        times = saved.nbytes / max(1, planned_bytes) - 1
        return int(times * schedule.most_workspace_bytes)
