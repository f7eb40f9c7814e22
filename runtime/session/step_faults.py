"""What goes wrong with storage while steps run, and can be planned around."""

from teraplan.runtime.engine.engine import Engine

_MOST_SPOILED = 3
"""In a row; where each step has faults, they are what steps are like."""


class StepFaults:
    """Of the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_in_a_row = 0
        self._num_working = len(engine.device.stores())
        """Storage directories that took tensors at the end of the last step."""

    def take(self) -> list[str]:
        """Those of the step that has ended, a sentence each."""
        stays = "could not leave the device, and stayed"
        faults = [f"{stays}: {error}" for error in self._engine.mover.faults]
        stores = self._engine.device.stores()
        idle = [store for store in stores if not (store.in_use and store.answers)]
        if len(stores) - len(idle) < self._num_working:
            faults.append("; ".join(store.fallbacks[-1] for store in idle))
        self._num_working = len(stores) - len(idle)
        self._num_in_a_row = self._num_in_a_row + 1 if faults else 0
        if faults:
            self._engine.device.give_back_heap(cycles=True)  # errors hold frames, these tensors
        return faults

    @property
    def spoil(self) -> bool:
        """True if what the step has taken says little of others: tensors left late, or not."""
        return 0 < self._num_in_a_row <= _MOST_SPOILED
