"""What goes wrong with storage while steps run, and can be planned around."""

from teraplan.runtime.engine.engine import Engine

_MOST_SPOILED = 3
"""In a row; where each step has faults, they are what steps are like."""


class StepFaults:
    """Of the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_in_a_row = 0
        self._num_stores = len(engine.device.stores())
        """That were in use at the end of the last step."""

    def take(self) -> list[str]:
        """Those of the step that has ended, a sentence each."""
        stays = "could not leave the device, and stayed"
        faults = [f"{stays}: {error}" for error in self._engine.mover.faults]
        working = sum(store.in_use for store in self._engine.device.stores())
        if working < self._num_stores:
            faults.append(f"{self._num_stores - working} storage directories are out of use")
        self._num_stores = working
        self._num_in_a_row = self._num_in_a_row + 1 if faults else 0
        return faults

    @property
    def spoil(self) -> bool:
        """True if what the step has taken says little of others: tensors left late, or not."""
        return 0 < self._num_in_a_row <= _MOST_SPOILED
