"""The step that a trace becomes when some of its activations are computed again.

    kept         a saved [========== idle ===========][need a ... done a]
                 b saved [============ idle ==============][need b ...  ]
    a from b                                          [need a ... done a]     a is born here,
                 b saved [========== idle ===========][need b .......... ]    b has to be there,
                                                      |--+ time-|             and it takes time

It is a step like any other: planners, simulator and reports need not know how its tensors are made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from teraplan.values.step_trace import Recompute, StepTrace, Tensor


def recomputable(trace: StepTrace) -> Iterator[tuple[int, Recompute]]:
    """Tensors that could be dropped in `trace`, with what each takes."""
    for tensor_id, tensor in enumerate(trace.tensors):
        recompute = tensor.recompute
        if recompute is None or len(tensor.windows) != 2:
            continue
        (saved, end), (need, _) = tensor.windows
        if saved == end < need < len(trace.sites) and all(
            _is_there(trace.tensors[source], need) for source in recompute.sources
        ):
            yield tensor_id, recompute


def _is_there(source: Tensor, site: int) -> bool:
    """True if `source` is still of use at `site`, or later."""
    return len(source.windows) == 2 and source.windows[0][1] <= site < source.windows[1][1]


def independent(trace: StepTrace, tensor_ids: Iterable[int]) -> Iterator[int]:
    """Those of `tensor_ids`, in their order, that can be computed again beside those before them.

    A tensor that is dropped is no source.
    """
    can_be = dict(recomputable(trace))
    chosen: set[int] = set()
    sources: set[int] = set()
    for tensor_id in tensor_ids:
        recompute = can_be.get(tensor_id)
        if recompute is None or tensor_id in chosen or tensor_id in sources:
            continue
        if chosen.isdisjoint(recompute.sources):
            chosen.add(tensor_id)
            sources.update(recompute.sources)
            yield tensor_id


def recomputed_step(trace: StepTrace, tensor_ids: Iterable[int]) -> StepTrace:
    """`trace` with these tensors dropped when they are saved, and computed when they are needed.

    Args:
        trace: the step in which everything is kept.
        tensor_ids: `independent` ones.
    """
    tensors, sites = list(trace.tensors), list(trace.sites)
    for tensor_id in tensor_ids:
        tensor = tensors[tensor_id]
        assert tensor.recompute is not None, f"{tensor.name} has no recipe"
        need = tensor.windows[1][0]
        tensors[tensor_id] = replace(tensor, windows=tensor.windows[1:], recompute=None)
        site = sites[need]
        sites[need] = replace(
            site,
            duration_ns=site.duration_ns + tensor.recompute.duration_ns,
            workspace_bytes=site.workspace_bytes + tensor.recompute.temporary_bytes,
        )
        for source in tensor.recompute.sources:
            first, (start, end) = tensors[source].windows
            windows = (first, (min(start, need), end))
            tensors[source] = replace(tensors[source], windows=windows, recompute=None)
    return replace(trace, tensors=tuple(tensors), sites=tuple(sites))
