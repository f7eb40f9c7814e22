"""Hypothesis strategies of steps, machines and migrations."""

from dataclasses import replace

from hypothesis import strategies as st

from teraplan.values.hardware import Hardware, Link
from teraplan.values.step_trace import Site, SiteKind, StepTrace, Tensor, TensorKind
from tests.planning.synthetic import FINGERPRINT


@st.composite
def traces(draw: st.DrawFn, max_tensors: int = 8, persistent: bool = True) -> StepTrace:
    """Micro-batches of forward and backward, with some order of backward and some reuse."""
    events: list[tuple[SiteKind, int | None, bool, int]] = []
    windows: list[list[list[int]]] = []
    kinds: list[bool] = []
    for call in range(draw(st.integers(1, 3))):
        events.append((SiteKind.ENTER, None, False, call))
        mine = range(len(windows), len(windows) + draw(st.integers(1, max_tensors)))
        for tensor in mine:
            windows.append([[len(events), len(events)]])
            kinds.append(False)
            events.append((SiteKind.SAVE, tensor, False, call))
        events.append((SiteKind.ENTER, None, True, call))
        order = list(reversed(mine))
        if draw(st.booleans()):
            order = draw(st.permutations(order))
        twice = draw(st.lists(st.sampled_from(order), max_size=2))
        for tensor in [*order, *twice]:
            need = len(events)
            events.append((SiteKind.NEED, tensor, True, call))
            windows[tensor].append([need, need + 1])
            events.append((SiteKind.DONE, tensor, True, call))
    num_sites = len(events)
    if persistent:
        for _ in range(draw(st.integers(0, 3))):
            cuts = sorted(draw(st.sets(st.integers(0, num_sites), min_size=2, max_size=4)))
            pairs = [[a, b] for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
            windows.append(pairs)
            kinds.append(True)
    sizes = st.integers(0, 64) | st.sampled_from([1, 16, 64])
    tensors = tuple(
        Tensor(
            name=f"t{i}",
            kind=TensorKind.PARAMETER if lasting else TensorKind.ACTIVATION,
            nbytes=draw(sizes) * 1000,
            shape=(1,),
            dtype="float32",
            layer="",
            windows=tuple((a, b) for a, b in spans),
            persistent=lasting,
        )
        for i, (spans, lasting) in enumerate(zip(windows, kinds, strict=True))
    )
    sites = tuple(
        Site(
            kind=kind,
            graph="g0",
            call=call,
            backward=backward,
            tensor_id=tensor,
            duration_ns=draw(st.integers(0, 20)) * 1000,
            workspace_bytes=draw(st.integers(0, 20)) * 1000,
        )
        for kind, tensor, backward, call in events
    )
    return StepTrace(
        fingerprint=FINGERPRINT,
        state_bytes=draw(st.integers(0, 50)) * 1000,
        sites=sites,
        tensors=tensors,
    )


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A link whose speed is of the order of sizes over durations in `traces`."""
    out, back = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return Link(
        out_bytes_per_s=out * 10**8,
        back_bytes_per_s=back * 10**8,
        out_while_back_bytes_per_s=draw(st.integers(1, out)) * 10**8,
        back_while_out_bytes_per_s=draw(st.integers(1, back)) * 10**8,
        latency_ns=draw(st.integers(0, 3000)),
    )


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """A machine with storage, and sometimes host memory beside the device."""
    return Hardware(
        device="test",
        device_capacity_bytes=1 << 40,
        host_capacity_bytes=1 << 40,
        storage_capacity_bytes=1 << 40,
        host_link=draw(st.none() | links()),
        storage_link=draw(links()),
    )


def grown(trace: StepTrace, factor: int = 1000) -> StepTrace:
    """The same with tensors and times so many times as large: large enough to be split."""
    return replace(
        trace,
        state_bytes=trace.state_bytes * factor,
        sites=tuple(
            replace(
                site,
                duration_ns=site.duration_ns * factor,
                workspace_bytes=site.workspace_bytes * factor,
            )
            for site in trace.sites
        ),
        tensors=tuple(replace(t, nbytes=t.nbytes * factor) for t in trace.tensors),
    )
