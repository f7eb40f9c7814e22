"""A step as Chrome trace events, to be opened in Perfetto or chrome://tracing.

    process 1  planned             process 2  actual, step 7
      1  computation                 one slice per graph call and phase
      2  waits                       one slice per wait, named after its tensor
      3  updates on the host         one slice per update, named after its first parameter
      10 host out                    links: one track per store and direction, more where
      11 host back                   transfers overlap (slices of one track must not)
      counters                       memory by class, and the budget

Only X (complete), C (counter) and M (metadata) events; times are microseconds.
"""

from collections.abc import Iterator, Sequence

from teraplan.report.drawing import Drawing
from teraplan.report.summary import tensor_label
from teraplan.values.plan import Plan
from teraplan.values.run_record import TransferRecord
from teraplan.values.step_trace import Tensor

Event = dict[str, object]

_COMPUTATION, _WAITS, _HOST, _FIRST_LINK = 1, 2, 3, 10


def chrome_trace(plan: Plan, drawings: Sequence[Drawing]) -> dict[str, object]:
    """The JSON object format of the Trace Event Format, one process for each of `drawings`."""
    tensors = {tensor.name: tensor for tensor in plan.trace.tensors}
    events: list[Event] = []
    for pid, drawing in enumerate(drawings, start=1):
        events += _process_names(pid, drawing)
        events += _computation(pid, drawing)
        events += _waits(pid, drawing, tensors)
        events += _host_updates(pid, drawing, tensors)
        events += _transfers(pid, drawing, tensors)
        events += _memory(pid, drawing, plan.budgets.device_bytes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "policy": plan.policy,
            "device": plan.hardware.device,
            "step_ns": plan.prediction.step_ns,
            "ideal_ns": plan.prediction.ideal_ns,
        },
    }


def _metadata(pid: int, tid: int, kind: str, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _track(pid: int, tid: int, name: str) -> tuple[Event, Event]:
    return (
        _metadata(pid, tid, "thread_name", name=name),
        _metadata(pid, tid, "thread_sort_index", sort_index=tid),
    )


def _slice(
    pid: int, tid: int, name: str, category: str, start_ns: int, end_ns: int, args: Event
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def _process_names(pid: int, drawing: Drawing) -> Iterator[Event]:
    yield _metadata(pid, 0, "process_name", name=drawing.name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    yield from _track(pid, _COMPUTATION, "computation")
    yield from _track(pid, _WAITS, "waits")


def _computation(pid: int, drawing: Drawing) -> Iterator[Event]:
    for call in drawing.calls:
        phase = "backward" if call.backward else "forward"
        name = f"{phase} {call.graph} call {call.call}"
        args: Event = {"graph": call.graph, "call": call.call, "phase": phase}
        yield _slice(pid, _COMPUTATION, name, phase, call.start_ns, call.end_ns, args)


def _label(name: str, tensors: dict[str, Tensor]) -> str:
    return tensor_label(tensors[name]) if name in tensors else name


def _waits(pid: int, drawing: Drawing, tensors: dict[str, Tensor]) -> Iterator[Event]:
    for stall in drawing.stalls:
        name = f"wait for {_label(stall.tensor, tensors)}"
        args: Event = {"tensor": stall.tensor, "site": stall.site}
        end_ns = stall.start_ns + stall.duration_ns
        yield _slice(pid, _WAITS, name, "wait", stall.start_ns, end_ns, args)


def _host_updates(pid: int, drawing: Drawing, tensors: dict[str, Tensor]) -> Iterator[Event]:
    if drawing.host_updates:
        yield from _track(pid, _HOST, "updates on the host")
    for done in drawing.host_updates:
        name = f"update {_label(done.tensor, tensors)}"
        args: Event = {"tensor": done.tensor, "nbytes": done.nbytes}
        yield _slice(pid, _HOST, name, "update", done.start_ns, done.end_ns, args)


def _transfers(pid: int, drawing: Drawing, tensors: dict[str, Tensor]) -> Iterator[Event]:
    tid = _FIRST_LINK
    for link, transfers in sorted(by_link(drawing.transfers).items()):
        for number, lane in enumerate(lanes(transfers), start=1):
            yield from _track(pid, tid, link if number == 1 else f"{link} ({number})")
            for transfer in lane:
                yield _transfer(pid, tid, transfer, tensors)
            tid += 1


def _transfer(pid: int, tid: int, transfer: TransferRecord, tensors: dict[str, Tensor]) -> Event:
    duration_ns = transfer.end_ns - transfer.start_ns
    args: Event = {"tensor": transfer.tensor, "nbytes": transfer.nbytes, "tier": transfer.tier}
    if duration_ns > 0:
        args["GB/s"] = round(transfer.nbytes / duration_ns, 3)
    return _slice(
        pid,
        tid,
        _label(transfer.tensor, tensors),
        transfer.direction,
        transfer.start_ns,
        transfer.end_ns,
        args,
    )


def by_link(transfers: Sequence[TransferRecord]) -> dict[str, list[TransferRecord]]:
    """Transfers by link, store and direction: "storage /mnt/nvme0 back"."""
    found: dict[str, list[TransferRecord]] = {}
    for transfer in transfers:
        place = f"{transfer.tier} {transfer.store}".rstrip()
        found.setdefault(f"{place} {transfer.direction}", []).append(transfer)
    return found


def lanes(transfers: Sequence[TransferRecord]) -> list[list[TransferRecord]]:
    """Transfers sorted by start into the fewest rows in which none overlap."""
    rows: list[list[TransferRecord]] = []
    for transfer in sorted(transfers, key=lambda transfer: (transfer.start_ns, transfer.end_ns)):
        free = (row for row in rows if row[-1].end_ns <= transfer.start_ns)
        row = next(free, None)
        if row is None:
            rows.append([transfer])
        else:
            row.append(transfer)
    return rows


def _memory(pid: int, drawing: Drawing, budget_bytes: int) -> Iterator[Event]:
    previous: tuple[int, int] | None = None
    for start_ns, managed, fixed in zip(
        drawing.site_start_ns, drawing.managed_bytes, drawing.fixed_bytes, strict=True
    ):
        if (managed, fixed) != previous:
            args: Event = {"state and workspace": fixed, "managed": managed}
            yield _counter(pid, "device memory (bytes)", start_ns, args)
        previous = managed, fixed
    for time_ns in (0, drawing.duration_ns):
        yield _counter(pid, "device budget (bytes)", time_ns, {"budget": budget_bytes})


def _counter(pid: int, name: str, time_ns: int, args: Event) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time_ns / 1000, "args": args}
