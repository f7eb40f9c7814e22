"""The record of a step that ran under a plan."""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from teraplan.runtime.device import DeviceStall
from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.engine.recorder import StepRecorder
from teraplan.runtime.storage.tiers import record_of
from teraplan.values.run_record import TRAINING_STATE, RunRecord, StallRecord, TransferRecord
from teraplan.values.step_trace import StepTrace


def run_record(
    step: int,
    trace: StepTrace,
    recorder: StepRecorder,
    engine: Engine,
    transfers: tuple[TransferRecord, ...],
    device_stalls: Iterable[DeviceStall],
) -> RunRecord:
    """What happened in step number `step`, for which a plan had been made from `trace`."""
    names = _state_names(engine, recorder)
    stalls = (
        *engine.mover.stalls,
        *_device_stalls(device_stalls, recorder, names),
        *_waits_for_state(engine, recorder),
    )
    return RunRecord(
        step=step,
        duration_ns=recorder.total_ns(),
        device_peak_bytes=_counted_peak(trace, recorder, engine),
        managed_peak_bytes=engine.managed_peak_bytes,
        site_start_ns=recorder.site_starts_ns(),
        managed_bytes=recorder.managed_bytes(),
        transfers=_from_start(
            (*_under_names(transfers, names), *_of_state(engine, recorder)),
            recorder.start_ns,
        ),
        stalls=stalls,
    )


def _counted_peak(trace: StepTrace, recorder: StepRecorder, engine: Engine) -> int:
    managed = recorder.managed_bytes()
    if len(managed) != len(trace.sites):
        return trace.state_bytes + engine.managed_peak_bytes
    return trace.state_bytes + max(
        site.workspace_bytes + nbytes for site, nbytes in zip(trace.sites, managed, strict=True)
    )


def _device_stalls(
    stalls: Iterable[DeviceStall], recorder: StepRecorder, names: Mapping[str, str]
) -> Iterator[StallRecord]:
    """Waits that did not block the computing thread, each at the site that it came after."""
    sites = recorder.site_starts_ns()
    for tensor, start_ns, duration_ns in stalls:
        if start_ns < recorder.start_ns:  # of the step before
            continue
        start = start_ns - recorder.start_ns
        site = max(0, bisect.bisect_right(sites, start) - 1)
        name = names.get(tensor, tensor)
        yield StallRecord(site=site, tensor=name, start_ns=start, duration_ns=duration_ns)


def _under_names(
    transfers: Iterable[TransferRecord], names: Mapping[str, str]
) -> Iterator[TransferRecord]:
    """What the device has written down of training state has the labels of its blocks."""
    for transfer in transfers:
        name = names.get(transfer.tensor)
        yield dataclasses.replace(transfer, tensor=name) if name is not None else transfer


def _state_names(engine: Engine, recorder: StepRecorder) -> dict[str, str]:
    """What a trace calls the training state, by labels of blocks, if the device writes these."""
    state = engine.training_state
    if state is None or not state.arena.memory.is_told_by_device:
        return {}
    found = ((block.label, recorder.state.name_of(block)) for block in list(state.arena.blocks))
    return {label: name for label, name in found if name is not None}


def _of_state(engine: Engine, recorder: StepRecorder) -> Iterator[TransferRecord]:
    if engine.training_state is None:
        return
    for block, move in engine.training_state.arena.log.moves:
        name = recorder.state.name_of(block)
        if name is not None:
            yield record_of(move, name)


def _waits_for_state(engine: Engine, recorder: StepRecorder) -> Iterator[StallRecord]:
    """Under the tensors' names; `TRAINING_STATE` for what the step has used without a site."""
    if engine.training_state is None:
        return
    sites = recorder.site_starts_ns()
    for block, start_ns, duration_ns in engine.training_state.arena.log.waits:
        start = max(0, start_ns - recorder.start_ns)
        yield StallRecord(
            site=max(0, bisect.bisect_right(sites, start) - 1),
            tensor=recorder.state.name_of(block) or TRAINING_STATE,
            start_ns=start,
            duration_ns=duration_ns,
        )


def _from_start(transfers: tuple[TransferRecord, ...], start_ns: int) -> tuple[TransferRecord, ...]:
    """The transfers with times counted from the start of their step."""
    return tuple(
        dataclasses.replace(
            t, start_ns=max(0, t.start_ns - start_ns), end_ns=max(0, t.end_ns - start_ns)
        )
        for t in transfers
    )
