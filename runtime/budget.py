"""What the graphs predict of a step's memory, before any step has been measured."""

from collections.abc import Iterable

from teraplan.errors import InfeasibleBudgetError
from teraplan.graph_table import GraphTable
from teraplan.runtime import census
from teraplan.runtime.device import Device
from teraplan.units import format_nbytes

_MEASURED_IN_BYTES = 256 << 10


class GraphForecast:
    """State counted now, state that training will add, and what the compiled graphs need."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.state_bytes = 0
        self.future_state_bytes = 0
        """Gradients and optimizer state that do not exist yet."""
        self._saved_bytes = self._workspace_bytes = self._largest_bytes = 0
        self._largest_slot_bytes = 0

    def refresh(self, tables: Iterable[GraphTable], *, update_bytes: int | None = None) -> None:
        """Count the state anew and take in all graphs compiled so far.

        Args:
            tables: of the graphs.
            update_bytes: if gradients and optimizer state are accounted for elsewhere, what one
                parameter's update needs beside them; else None.
        """
        self.state_bytes = self._device.state_bytes()
        if update_bytes is None:
            update_bytes = census.missing_nbytes(self._device.type)
        self.future_state_bytes = update_bytes
        for table in tables:
            self.add(table)

    def add(self, table: GraphTable) -> None:
        """Take in one graph."""
        self._saved_bytes = max(self._saved_bytes, sum(slot.nbytes for slot in table.slots))
        largest_slot = max((slot.nbytes for slot in table.slots), default=0)
        self._largest_slot_bytes = max(self._largest_slot_bytes, largest_slot)
        workspace = max(table.forward_workspace_bytes, table.backward_workspace_bytes)
        self._workspace_bytes = max(self._workspace_bytes, workspace)
        self._largest_bytes = max(self._largest_bytes, table.largest_operation_bytes)

    @property
    def other_bytes(self) -> int:
        """All that is not a saved activation, workspace as the graphs predict it."""
        return self.state_bytes + self.future_state_bytes + self._workspace_bytes

    @property
    def enough_bytes(self) -> int:
        """A budget that the graphs predict to be enough, everything that can move elsewhere.

        Besides the rest, an operation and the one before it have a saved activation each at hand;
        and memory that is measured as the process's comes in pages.
        """
        return self.other_bytes + 2 * self._largest_slot_bytes + _MEASURED_IN_BYTES

    @property
    def unlimited_peak_bytes(self) -> int:
        """Peak of the step with nothing moved."""
        return self.other_bytes + self._saved_bytes

    def refuse_hopeless(self, budget_bytes: int) -> None:
        """Raise InfeasibleBudgetError if the state and the largest operation do not fit."""
        state = self.state_bytes + self.future_state_bytes
        if budget_bytes >= state + self._largest_bytes:
            return
        raise InfeasibleBudgetError(
            f"device_budget is {format_nbytes(budget_bytes)}, but parameters, gradients and "
            f"optimizer state take {format_nbytes(state)} and the largest operation "
            f"{format_nbytes(self._largest_bytes)} more; set device_budget to "
            f"{format_nbytes(self.enough_bytes)} ({self.enough_bytes} bytes), which the graphs "
            "predict to be enough",
            least_budget_bytes=self.enough_bytes,
        )
