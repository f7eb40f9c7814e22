"""A step from a list of operations: one site for each, touching what the operation reads or writes.

    Tape.op(...)        forward: a value comes out; what the backward needs of it is remembered
    Tape.backward()     the same operations in reverse: twice the flops, gradients of parameters
    StepBuilder.site()  anything else, such as the update of one parameter

A value lives from the operation that makes it to the last that uses it, in the backward if it was
saved. Gradients of values are the workspace of the operations that pass them on. A parameter's
gradient lives from its first accumulation in the step to the update.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from teraplan.library.costs import Roofline
from teraplan.values.step_trace import (
    UPDATE_GRAPH,
    Fingerprint,
    Site,
    SiteKind,
    StepTrace,
    Tensor,
    TensorKind,
    Update,
)

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1}


@dataclass(slots=True)
class _Entry:
    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    dtype: str
    layer: str
    persistent: bool
    windows: list[list[int]] = field(default_factory=list[list[int]])
    changed: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operation costs."""

    flops: float = 0.0
    workspace_bytes: int = 0
    dtype: str | None = None
    """In which it computes; None: that of the step."""


@final
class StepBuilder:
    """Collects sites and tensors; mutable."""

    def __init__(self, costs: Roofline, dtype: str, kernels: int = 1) -> None:
        self.costs = costs
        self.dtype = dtype
        self._kernels = kernels
        """Sites of each operation; all touch its tensors."""
        self._entries: list[_Entry] = []
        self._sites: list[Site] = []
        self._updates: list[Update] = []

    def tensor(
        self,
        name: str,
        kind: TensorKind,
        shape: Sequence[int],
        *,
        layer: str = "",
        dtype: str | None = None,
        persistent: bool = False,
    ) -> int:
        """Id of a new tensor; it is born when a site first touches it."""
        entry = _Entry(name, kind, tuple(shape), dtype or self.dtype, layer, persistent)
        self._entries.append(entry)
        return len(self._entries) - 1

    def rename(
        self, tensor_id: int, name: str, kind: TensorKind, *, persistent: bool = False
    ) -> None:
        """Says of a tensor what has turned out since it was made."""
        entry = self._entries[tensor_id]
        entry.name, entry.kind, entry.persistent = name, kind, persistent
        entry.layer = name.rpartition(".")[0]

    def nbytes(self, tensor_id: int) -> int:
        """Size of a tensor."""
        entry = self._entries[tensor_id]
        return prod(entry.shape) * BYTES[entry.dtype]

    def numel(self, tensor_id: int) -> int:
        """Number of elements of a tensor."""
        return prod(self._entries[tensor_id].shape)

    def site(
        self,
        graph: str,
        call: int,
        touches: Iterable[int],
        work: Work,
        *,
        changes: Iterable[int] = (),
        backward: bool = False,
    ) -> None:
        """An operation that reads or writes the tensors `touches`, and changes some of them."""
        ids = list(dict.fromkeys(touches))
        index = len(self._sites)
        moved = sum(self.nbytes(i) for i in ids) + work.workspace_bytes
        duration_ns = self.costs.nanoseconds(work.flops, moved, work.dtype or self.dtype)
        for kernel in range(self._kernels):
            first = kernel == 0 and bool(ids)
            self._sites.append(
                Site(
                    kind=SiteKind.NEED if first else SiteKind.ENTER,
                    graph=graph,
                    call=call,
                    backward=backward,
                    tensor_id=ids[0] if first else None,
                    duration_ns=duration_ns // self._kernels,
                    workspace_bytes=work.workspace_bytes,
                )
            )
        for i in ids:
            windows = self._entries[i].windows
            if windows and windows[-1][1] == index:
                windows[-1][1] = len(self._sites)
            else:
                windows.append([index, len(self._sites)])
        for i in changes:
            entry = self._entries[i]
            number = len(entry.windows) - 1
            if not entry.changed or entry.changed[-1] != number:
                entry.changed.append(number)

    def update(
        self,
        call: int,
        tensors: tuple[Sequence[int], Sequence[int], Sequence[int]],
        work: Work,
        *,
        ready: int | None = None,
    ) -> None:
        """A bucket of the optimizer's step: its parameters, gradients and states.

        On the host it may begin at site `ready`; None: after the last use of its gradients.
        """
        parameters, gradients, states = (tuple(ids) for ids in tensors)
        start = len(self._sites)
        ends = [self._entries[i].windows[-1][1] for i in gradients]
        changed = (*parameters, *states)
        touched = (*parameters, *gradients, *states)
        self.site(UPDATE_GRAPH, call, touched, work, changes=changed, backward=True)
        self._updates.append(
            Update(
                start=start,
                end=len(self._sites),
                ready=max(ends) if ready is None else ready,
                parameters=parameters,
                gradients=gradients,
                states=states,
            )
        )

    @property
    def num_sites(self) -> int:
        """Sites so far."""
        return len(self._sites)

    def build(self, device: str, state_bytes: int = 0) -> StepTrace:
        """The step as recorded; tensors that no site touches are left out."""
        used = [i for i, entry in enumerate(self._entries) if entry.windows]
        number = {old: new for new, old in enumerate(used)}
        tensors = tuple(
            Tensor(
                name=entry.name,
                kind=entry.kind,
                nbytes=self.nbytes(i),
                shape=entry.shape,
                dtype=entry.dtype,
                layer=entry.layer,
                windows=tuple((start, end) for start, end in entry.windows),
                persistent=entry.persistent,
                changed_in=tuple(entry.changed),
            )
            for i, entry in ((i, self._entries[i]) for i in used)
        )
        sites = tuple(
            replace(site, tensor_id=None if site.tensor_id is None else number[site.tensor_id])
            for site in self._sites
        )
        sizes = ",".join(str(tensor.nbytes) for tensor in tensors)
        return StepTrace(
            fingerprint=Fingerprint(
                graphs=tuple(dict.fromkeys(site.graph for site in sites)),
                shapes=hashlib.blake2b(sizes.encode(), digest_size=8).hexdigest(),
                torch_version="none",
                kernels="roofline",
                device=device,
            ),
            state_bytes=state_bytes,
            sites=sites,
            tensors=tensors,
            updates=tuple(
                replace(
                    update,
                    parameters=tuple(number[i] for i in update.parameters),
                    gradients=tuple(number[i] for i in update.gradients),
                    states=tuple(number[i] for i in update.states),
                )
                for update in self._updates
            ),
        )


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: str
    needed: tuple[int, ...]
    parameters: tuple[int, ...]
    flops: float
    workspace_bytes: int


@final
class Tape:
    """One micro-batch: its forward as it is written down, then its backward."""

    def __init__(self, builder: StepBuilder, call: int, gradients: dict[int, int]) -> None:
        self._builder = builder
        self._call = call
        self._gradients = gradients
        """Gradient of each parameter; shared by all micro-batches."""
        self._recorded: list[_Recorded] = []

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        *,
        graph: str,
        parameters: Sequence[int] = (),
        saves: Sequence[int] = (),
        saves_output: bool = False,
        flops: float = 0.0,
        dtype: str | None = None,
        backward: bool = True,
    ) -> int:
        """The value that an operation makes.

        Args:
            name: unique within the graph.
            inputs: values that it reads.
            shape: of the value.
            graph: module path.
            parameters: that it reads; each gets a gradient.
            saves: of the inputs, what its backward reads again.
            saves_output: whether its backward reads the value again.
            flops: of the forward.
            dtype: of the value; None: that of the step.
            backward: whether there is one.
        """
        builder = self._builder
        path = f"mb{self._call}.{graph}/{name}"
        out = builder.tensor(path, TensorKind.ACTIVATION, shape, layer=graph, dtype=dtype)
        touched = (*inputs, *parameters, out)
        builder.site(graph, self._call, touched, Work(flops=flops))
        if backward:
            needed = (*saves, out) if saves_output else tuple(saves)
            gradients = sum(builder.nbytes(i) for i in inputs) + builder.nbytes(out)
            self._recorded.append(_Recorded(graph, needed, tuple(parameters), 2 * flops, gradients))
        return out

    def backward(self) -> None:
        """The backward of all operations so far."""
        builder = self._builder
        for done in reversed(self._recorded):
            gradients = [self._gradients[p] for p in done.parameters]
            work = Work(flops=done.flops, workspace_bytes=done.workspace_bytes)
            touched = (*done.needed, *done.parameters, *gradients)
            builder.site(done.graph, self._call, touched, work, changes=gradients, backward=True)
        self._recorded.clear()
