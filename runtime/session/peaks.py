"""The most memory that a process took: in the last steps under the plan in force, and between."""

from teraplan.runtime.device import Device
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.session.case import Case


class Peaks:
    """Of one session."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def forget(self, case: Case) -> None:
        """Another plan comes into force for a kind of step."""
        self._device.take_peak()
        case.peaks_bytes.clear()

    def leave_out_what_followed(self, recorder: StepRecorder) -> None:
        """A step begins: what came after the last one, or was refused, is no step's."""
        beyond_bytes = self._device.peak_bytes() - recorder.peak_bytes
        if beyond_bytes > 0:
            self._device.let_go(beyond_bytes)
            self._device.take_peak()

    def add(self, case: Case, recorder: StepRecorder) -> None:
        """A step under the plan in force has ended."""
        case.peaks_bytes.append(recorder.peak_bytes)

    def of_tensors(self, case: Case | None, recorder: StepRecorder | None) -> int:
        """The most that tensors took in steps of late under the plan in force; -1 if unknown.

        Args:
            case: the kind of the step under way.
            recorder: of that step.
        """
        if case is None or case.schedule is None or case.memory is None:
            return -1
        ended_bytes = recorder.peak_bytes if recorder is not None else 0
        peak_bytes = max(*case.peaks_bytes, ended_bytes or self._device.peak_bytes(), 0)
        return peak_bytes - case.memory.overhead_bytes
