"""What the graphs predict of a step's memory, before any step has been measured."""

from collections.abc import Callable, Iterable

from teraplan.errors import InfeasibleBudgetError
from teraplan.runtime.device import Device
from teraplan.runtime.process import census
from teraplan.runtime.session.state_count import StateCount
from teraplan.units import format_nbytes
from teraplan.values.graph_table import MIN_SLOT_BYTES, GraphTable

_MEASURED_IN_BYTES = 512 << 10
"""Memory that is measured as the process's comes in pages."""
_SPARE_FRACTION = 1 / 64
"""Of the predicted least is added: kernels have memory of their own."""
_MUCH_THAT_IS_SHARED_BYTES = 1 << 20
"""Of less than this a refusal says nothing."""
_MARGIN_BYTES = 64 << 10
"""By so much, and a little more, a budget that is named as enough is larger than the least."""
_WIDE_MARGIN_BYTES, _WIDE_MARGIN_FRACTION = 4 << 20, 1 / 8
"""The same where nothing but activations can make up for what kernels take more than predicted, and
its part of what graphs have beside what lasts; at most half of the way to where nothing moves. Of
16 models one with two forwards and three backwards in a step lacked more, the others up to 3.9 MiB.
"""
_LEAST_WIDE_MARGIN_BYTES, _LEAST_WIDE_MARGIN_FRACTION = 2 << 20, 1 / 10
"""Where hardly anything can move, that way is short: three such models lacked 0.5 to 1.5 MiB, 3 to
8 percent. The less of the two counts."""
_NARROW_MARGIN_BYTES, _NARROW_MARGIN_FRACTION = 1 << 20, 1 / 32
"""The same where a step is one forward and its backward, of which the code has been rehearsed."""
_MARGIN_WHERE_STATE_MOVES = 1 / 10
"""Of all that is named, at most so much. Of 16 models one with checkpoints lacked 7 %, one that
adds up gradients 11 %, two small ones that clip them 21 and 49 %, since what is read is in memory.
"""
_HOPELESS_FRACTION, _HOPELESS_WHERE_SIZES_VARY = 5 / 8, 1 / 4
"""Of what graphs have beside what lasts. Of 26 models with fixed sizes at least 0.72 of it was
needed (median 0.96); where sizes vary, three quarters were not."""
_HOPELESS_WHERE_REHEARSED = 3 / 4
"""The same where a step is one forward and its backward, of which the code has been rehearsed. Of
some forty models one trained with a little less than seven eighths of it."""
_UNTOLD_FRACTION = 1 / 16
"""Of what is trained, gradients of so much are taken to be made by graphs that are known."""
_MOST_CALLS = 32
"""As many as one graph has saved, a step may save in all: blocks are compiled one by one, or graphs
break, and how often they are called is seen when they are."""


class GraphForecast:
    """State counted now, state that training will add, and what the compiled graphs need."""

    def __init__(self, device: Device) -> None:
        self._device, self._count = device, StateCount(device)
        self.state_bytes = 0
        self.gradients_bytes = self.optimizer_bytes = 0
        """Of gradients and optimizer state, what does not exist yet."""
        self.update_bytes = 0
        """What one parameter's update needs beside its state."""
        self.saved_bytes = 0
        """The most that a step of the kind has saved as far as it was seen."""
        self._state_moves = False
        self._tables: dict[str, GraphTable] = {}
        self._is_whole: bool | None = None
        """Of the only graph; None: not known."""

    def refresh(
        self,
        tables: Iterable[GraphTable],
        *,
        update_bytes: int,
        elsewhere_bytes: int = 0,
        state_moves: bool,
        step: int | None = None,
    ) -> bool:
        """A step of some kind begins; true if the state was counted anew.

        Args:
            tables: of the graphs that such steps run, as far as is known.
            update_bytes: what one parameter's update needs beside its state.
            elsewhere_bytes: of the state that optimizers will make, what is not on the device.
            state_moves: that of large parameters is accounted for elsewhere.
            step: number of the step, where a count of a step before may do.
        """
        self.update_bytes, self._state_moves = update_bytes, state_moves
        self._tables = {table.graph: table for table in tables}
        is_new = self._count.refresh(self._tables, below=self._below, step=step)
        self.state_bytes = self._count.state_bytes
        self.gradients_bytes = self._count.gradients_bytes
        self.optimizer_bytes = self._count.optimizer_bytes - elsewhere_bytes
        if is_new:
            self._is_whole = None
        return is_new

    def add(self, table: GraphTable) -> None:
        """Take in one graph."""
        self._tables[table.graph] = table

    def meet(self, table: GraphTable, *, update_bytes: int, elsewhere_bytes: int) -> None:
        """Take in one graph in the middle of a step: what lasts cannot be counted there.

        The arguments are as in `refresh`.
        """
        self.add(table)
        self.update_bytes = update_bytes
        self._count.meet(table.graph, below=self._below)
        self.gradients_bytes = max(self.gradients_bytes, self._count.gradients_bytes)
        optimizer_bytes = self._count.optimizer_bytes - elsewhere_bytes
        self.optimizer_bytes = max(self.optimizer_bytes, optimizer_bytes)

    def know_only(self, tables: Iterable[GraphTable]) -> None:
        """The step runs these graphs, and no others that are known."""
        self._tables = {table.graph: table for table in tables}
        self._is_whole = None

    @property
    def overhead_bytes(self) -> int | None:
        """What the process held beside tensors when they were counted last; None if not known."""
        return self._count.overhead_bytes

    @property
    def _below(self) -> int | None:
        """Of larger parameters, gradients and optimizer state are accounted for elsewhere."""
        return MIN_SLOT_BYTES if self._state_moves else None

    @property
    def future_state_bytes(self) -> int:
        """Gradients and optimizer state that do not exist yet."""
        return self.gradients_bytes + self.optimizer_bytes

    @property
    def lasting_bytes(self) -> int:
        """What is there all the time, once an optimizer has stepped."""
        return self.state_bytes + self.optimizer_bytes

    @property
    def other_bytes(self) -> int:
        """All that is not a saved activation, workspace as the graphs predict it."""
        beside = (
            table.resident_bytes(self.gradients_bytes, state_moves=self._state_moves)
            for table in self._tables.values()
        )
        return self.lasting_bytes + max([self._updated_bytes, *beside])

    @property
    def least_bytes(self) -> int:
        """What the graphs predict to be enough, everything that can move elsewhere."""
        return self._least_beside(self._beside_bytes)

    def _least_beside(self, beside_bytes: int) -> int:
        return self._with_spare(max(self._updated_bytes, beside_bytes))

    def _with_spare(self, beside_bytes: int) -> int:
        """What lasts and this beside it, and some more; what lasts is known to the byte."""
        if self._is_exact:
            return self.lasting_bytes + with_spare(beside_bytes)
        return with_spare(self.lasting_bytes + beside_bytes)

    @property
    def _beside_bytes(self) -> int:
        """What graphs have at once beside what lasts."""
        beside = (
            table.beside_bytes(self.gradients_bytes, state_moves=self._state_moves)
            for table in self._tables.values()
        )
        return max(beside, default=0)

    @property
    def beside_forwards_bytes(self) -> int:
        """The same of forwards alone."""
        return max((t.forward.least_bytes for t in self._tables.values()), default=0)

    def beside_backward_bytes(self, table: GraphTable) -> int:
        """The same of one backward."""
        return table.beside_backward_bytes(self.gradients_bytes, state_moves=self._state_moves)

    @property
    def unlimited_peak_bytes(self) -> int:
        """Peak of the step with nothing moved, or a part of it where calls are still to come."""
        if self._is_exact:
            (table,) = self._tables.values()
            kept = table.kept_bytes(self.gradients_bytes, state_moves=self._state_moves)
            kept += max(0, self.saved_bytes - table.saved_bytes)  # of further calls
            return self.lasting_bytes + max(self._updated_bytes, kept)
        return self.other_bytes + max(self.saved_bytes, self._saved_at_once)

    @property
    def most_peak_bytes(self) -> int:
        """What that may turn out to be."""
        return self.other_bytes + max(self.saved_bytes, _MOST_CALLS * self._saved_at_once)

    @property
    def has_sizes_of_values(self) -> bool:
        """True if some sizes follow from values: all that is said here may be far too little."""
        return any(table.sizes_of_values for table in self._tables.values())

    @property
    def says_nothing(self) -> bool:
        """True if, besides, no step has shown how much it saves."""
        return self.has_sizes_of_values and not self.saved_bytes

    @property
    def _saved_at_once(self) -> int:
        return max((table.saved_bytes for table in self._tables.values()), default=0)

    def refuse(
        self,
        budget_bytes: int,
        *,
        certainly: bool,
        moving_bytes: int = 0,
        shared_bytes: int = 0,
        given: str = "",
        beside_bytes: int | None = None,
        count_staying: Callable[[], int | None] | None = None,
        has_run: bool = False,
    ) -> None:
        """Raise InfeasibleBudgetError if the budget is less than what the graphs predict.

        Args:
            budget_bytes: the device budget, but for the part of a training state that moves.
            moving_bytes: that part.
            shared_bytes: of what could move and stays, since something else has it, too.
            certainly: only if it is so much less that measuring would show the same.
            given: how the user has written the budget, if not in bytes.
            beside_bytes: what the graph that begins has at once beside what lasts; None: all graphs
                will run, forward and backward.
            count_staying: gives the whole of the training state that moves, if it stays where it
                fits, else None.
            has_run: all graphs of a forward have.
        """
        beside = self._beside_bytes if beside_bytes is None else beside_bytes
        needed = self._hopeless_bytes(beside) if certainly else self._least_beside(beside)
        if budget_bytes >= needed:
            return
        least = self.least_bytes
        state = self.state_bytes + self.future_state_bytes
        named = self._named_bytes(moving_bytes, certainly=certainly)
        part = f", {format_nbytes(max(0, budget_bytes))} of it beside the training state that moves"
        for_state = f", with {format_nbytes(moving_bytes)} for the training state that moves"
        if moving_bytes and shared_bytes > _MUCH_THAT_IS_SHARED_BYTES:
            for_state += (
                f"; {format_nbytes(shared_bytes)} of it stay since something else has these "
                "tensors, too, such as a state_dict that was loaded and is still there: drop what "
                "is no longer needed"
            )
        staying_bytes = count_staying() if count_staying is not None else None
        if self._is_exact and not self._state_moves:
            staying_bytes = 0
        if staying_bytes is not None and self.knows_all_graphs:
            beside = self.unlimited_peak_bytes - self.lasting_bytes
            unmoved = _with_margin(self._with_spare(beside) + staying_bytes)
            if budget_bytes + moving_bytes < unmoved < named:
                named, for_state = unmoved, ", with which nothing has to move"
        what, enough = "an update needs beside them", "holds them"
        if self._tables:
            what, enough = "the graphs have at once beside them", "they predict to be enough"
        others = "; graphs still to run may need more"
        if has_run:
            others = ""
        elif self.knows_all_graphs:
            others = "; what the step makes beside its graphs comes on top" if self._tables else ""
        raise InfeasibleBudgetError(
            f"device_budget is {given}{format_nbytes(budget_bytes + moving_bytes)}"
            f"{part if moving_bytes else ''}, but what stays (parameters, gradients, optimizer "
            f"state, buffers, data that the program holds) takes {format_nbytes(state)}, and with "
            f"what {what} it is {format_nbytes(least)}; set device_budget to "
            f"{format_nbytes(named)} ({named} bytes), which {enough}"
            f"{for_state if moving_bytes else ''}{others}",
            least_budget_bytes=named,
        )

    @property
    def knows_all_graphs(self) -> bool:
        """True if the graphs make the gradients of nearly all that is trained."""
        made = sum(table.backward.gradients_bytes for table in self._tables.values())
        return made >= (1 - _UNTOLD_FRACTION) * census.trained_nbytes(self._device.type)

    @property
    def _is_exact(self) -> bool:
        """True if a step is one forward and its backward, rehearsed at the sizes that they have."""
        if len(self._tables) != 1:
            return False
        (table,) = self._tables.values()
        if not table.is_rehearsed or table.sizes_vary:
            return False
        if self._is_whole is None:  # to see that takes a tenth of a second
            self._is_whole = self.knows_all_graphs
        return self._is_whole

    def _named_bytes(self, moving_bytes: int, *, certainly: bool) -> int:
        """A budget that is enough, as far as the graphs tell; see `refuse`."""
        named = _with_margin(self.least_bytes) + moving_bytes
        if not self._tables:
            return named
        margin = self._margin_bytes
        if self._state_moves or not certainly:  # state has what they turn out not to need
            margin = min(margin, int(named * _MARGIN_WHERE_STATE_MOVES))
        return named + margin

    def _hopeless_bytes(self, beside_bytes: int) -> int:
        """Measuring would not show that less is enough."""
        vary = any(table.sizes_vary for table in self._tables.values())
        part = _HOPELESS_WHERE_SIZES_VARY if vary else _HOPELESS_FRACTION
        if self._is_exact:
            part = _HOPELESS_WHERE_REHEARSED
        return self.lasting_bytes + max(self._updated_bytes, int(beside_bytes * part))

    @property
    def _margin_bytes(self) -> int:
        beside = self.least_bytes - self.lasting_bytes
        if self._is_exact:
            return _NARROW_MARGIN_BYTES + int(beside * _NARROW_MARGIN_FRACTION)
        margin = _WIDE_MARGIN_BYTES + int(beside * _WIDE_MARGIN_FRACTION)
        half = max(0, self.unlimited_peak_bytes - self.least_bytes) // 2
        part = int(self.least_bytes * _LEAST_WIDE_MARGIN_FRACTION)
        return min(margin, max(half, min(_LEAST_WIDE_MARGIN_BYTES, part)))

    @property
    def _updated_bytes(self) -> int:
        """Beside what lasts, while the optimizer steps."""
        return self.gradients_bytes + self.update_bytes


def _with_margin(nbytes: int) -> int:
    """What to name as enough: a batch that the next run has in memory, too, must not be missing."""
    return nbytes + nbytes // 256 + _MARGIN_BYTES


def with_spare(nbytes: int) -> int:
    """What is predicted, and some more."""
    return nbytes + int(nbytes * _SPARE_FRACTION) + _MEASURED_IN_BYTES
