"""What one training step does to memory: the input of planning.

A step is a row of sites, the places in compiled graphs where the runtime gets control. Interval k
is the stretch of computation from site k to site k+1; the last one ends where the next step begins.

    site      0        1        2          3        4        5
              enter    save a   save b     need b   done b   need a ...
    interval  |---0----|---1----|----2-----|---3----|---4----|---5--
    tensor a           [========= idle ======================[active ...
    tensor b                    [== idle ==[active==[

A tensor's `windows` are the half-open site ranges in which the computation touches it: it must be
on the device in every interval of each of them. Between two windows it is inactive and may be
elsewhere. An activation is born at its first window's start (an empty window: it has been computed
and used when its save site runs) and dies at its last window's end. A persistent tensor (parameter,
optimizer state) lives for ever, and its last inactive period wraps around the end of the step.

Everything is measured on the code that trains. `state_bytes` is what lives on the device in all of
the step beside the tensors listed here; `workspace_bytes` is what an interval needs on top of it.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class TensorKind(StrEnum):
    """The classes of tensors in a training step."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"


class SiteKind(StrEnum):
    """What a site tells the runtime."""

    ENTER = "enter"
    """A graph call begins; touches no tensor."""
    SAVE = "save"
    """The tensor has had its last use in the forward graph."""
    NEED = "need"
    """The tensor is about to be used."""
    DONE = "done"
    """The tensor has had its last use."""


UPDATE_GRAPH = "update"
"""What sites of the optimizer's step have in the place of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where the runtime gets control, and the interval that follows it."""

    kind: SiteKind
    graph: str
    """Stable identifier of the compiled graph."""
    call: int
    """Number of this call of any graph within the step, from 0; backward shares its forward's."""
    backward: bool
    tensor_id: int | None
    """Index into `StepTrace.tensors`; None for ENTER."""
    duration_ns: int
    """Computation in the interval after this site, waits for migrations excluded."""
    workspace_bytes: int
    """Peak in this interval of what is neither state nor listed tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """How an activation can be computed again where it is needed, instead of being kept."""

    duration_ns: int
    """Computation that it takes, as measured."""
    sources: tuple[int, ...]
    """Ids of the tensors that have to be on the device for it."""
    temporary_bytes: int = 0
    """Memory that it takes beside them and its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of the step that the runtime can move."""

    name: str
    """Stable name: graph, call and node, e.g. "g0.c2/gelu_3"."""
    kind: TensorKind
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    """Path of the module that made it ("blocks.3.mlp"), "" if unknown."""
    windows: tuple[tuple[int, int], ...]
    """Half-open site ranges in which it is touched, ascending, not overlapping."""
    persistent: bool = False
    """True if it outlives the step (parameters, optimizer state)."""
    changed_in: tuple[int, ...] | None = None
    """Numbers of the windows in which its bytes change, so that older copies of it are worthless;
    None if not known. That of its birth need not be among them."""
    recompute: Recompute | None = None
    """None: it can only be kept or moved."""

    @property
    def changes(self) -> tuple[int, ...]:
        """`changed_in`; where not known, none for an activation of one step, all for the rest."""
        if self.changed_in is not None:
            return self.changed_in
        fixed = self.kind is TensorKind.ACTIVATION and not self.persistent
        return () if fixed else tuple(range(len(self.windows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One bucket of the optimizer's step, which could as well run on the host's cores.

    On the device it is what runs in intervals start .. end-1, and all that does. Its tensors are
    touched by nothing after it in the step, its states by nothing else, and its parameters change
    in it alone.
    """

    start: int
    end: int
    ready: int
    """The first site at which it may begin on the host: where gradients have to be clipped
    together, after the last of them; else after those of the bucket."""
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def tensor_ids(self) -> tuple[int, ...]:
        """All of its tensors."""
        return (*self.parameters, *self.gradients, *self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a plan depends on beside numbers: a plan is replayed only where all of it is equal."""

    graphs: tuple[str, ...]
    """Content hash of each graph called in the step, in order of first call."""
    shapes: str
    """Hash of the sizes of all tensors in order."""
    torch_version: str
    kernels: str
    device: str
    """Name of the device, e.g. "cpu" or "NVIDIA H200"."""
    chunk_bytes: int | None = 0
    """Of the blocks that small tensors of the training state share: 0 if none do, None if not
    known. It depends on the machine and its free memory; a replay takes it from the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One measured step."""

    fingerprint: Fingerprint
    state_bytes: int
    sites: tuple[Site, ...]
    tensors: tuple[Tensor, ...]
    updates: tuple[Update, ...] = ()
    """In the order in which they run; those of which it is known that they could run elsewhere."""

    @property
    def duration_ns(self) -> int:
        """Length of the step with no waits for migrations: the ideal."""
        return sum(site.duration_ns for site in self.sites)

    def periods(self) -> Iterator[tuple[int, int, int]]:
        """Each inactive period as (tensor_id, start, end): idle in intervals start .. end-1.

        A period that wraps has `end` > number of sites.
        """
        num_sites = len(self.sites)
        for tensor_id, tensor in enumerate(self.tensors):
            windows = tensor.windows
            for (_, start), (end, _) in itertools.pairwise(windows):
                if end > start:
                    yield tensor_id, start, end
            if tensor.persistent and windows:
                start, end = windows[-1][1], windows[0][0] + num_sites
                if end > start:
                    yield tensor_id, start, end


def wrong_updates(trace: StepTrace) -> Iterator[tuple[int, str]]:
    """Numbers of updates that are not what `Update` says, and why."""
    tensors, num_sites = trace.tensors, len(trace.sites)
    owner: dict[int, int] = {}
    last = 0
    for number, update in enumerate(trace.updates):
        if not 0 <= update.ready <= update.start or not last <= update.start < update.end:
            yield number, "its sites are not ready <= start < end, after those of the one before"
            return
        if update.end > num_sites:
            yield number, f"it ends at site {update.end} of {num_sites}"
            return
        last = update.end
        for tensor_id in update.tensor_ids:
            if not 0 <= tensor_id < len(tensors):
                yield number, f"tensor {tensor_id} of {len(tensors)}"
                return
            if owner.setdefault(tensor_id, number) != number:
                yield number, f"{tensors[tensor_id].name} is in update {owner[tensor_id]}, too"
        if len(set(update.tensor_ids)) < len(update.tensor_ids):
            yield number, "it names a tensor twice"
        if not update.parameters or not update.gradients:
            yield number, "it has no parameters or no gradients"
        yield from ((number, why) for why in _wrong_tensors(trace, update))
    yield from _wrong_strangers(trace, owner)


def _wrong_tensors(trace: StepTrace, update: Update) -> Iterator[str]:
    for ids, persistent in ((update.parameters, True), (update.gradients, False)):
        for tensor in (trace.tensors[i] for i in ids):
            if tensor.persistent is not persistent:
                yield f"{tensor.name} {'does not outlive' if persistent else 'outlives'} the step"
            if not tensor.windows:
                continue
            if tensor.windows[0][0] >= update.start:
                yield f"{tensor.name} is touched nowhere before it"
            if not update.start < tensor.windows[-1][1] <= update.end:
                yield f"{tensor.name} is not touched last in it"
            if persistent and tensor.changes != (len(tensor.windows) - 1,):
                yield f"{tensor.name} changes elsewhere, or not in it"
    for tensor in (trace.tensors[i] for i in update.states):
        inside = all(update.start <= start and end <= update.end for start, end in tensor.windows)
        if not tensor.persistent or not inside:
            yield f"{tensor.name} is touched elsewhere, or does not outlive the step"


def _wrong_strangers(trace: StepTrace, owner: dict[int, int]) -> Iterator[tuple[int, str]]:
    """Updates in whose intervals a tensor is touched that is not theirs."""
    starts = [update.start for update in trace.updates]
    for tensor_id, tensor in enumerate(trace.tensors if starts else ()):
        for start, end in tensor.windows:
            first = max(bisect.bisect_right(starts, start) - 1, 0)
            for number in range(first, len(starts)):
                if starts[number] >= end:
                    break
                if trace.updates[number].end > start and owner.get(tensor_id) != number:
                    yield number, f"{tensor.name} is touched in it"
