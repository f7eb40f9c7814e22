"""What goes wrong with storage while steps run, and can be planned around."""

from teraplan.runtime.engine.engine import Engine


class StepFaults:
    """Of the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
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
        return faults
