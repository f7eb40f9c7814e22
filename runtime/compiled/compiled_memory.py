"""What a pair of graphs takes that Inductor has compiled, before any of it has run."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

from teraplan.runtime.compiled.generated_code import GeneratedCode, code_with
from teraplan.runtime.compiled.rehearsal import Rehearsal, rehearse
from teraplan.values.graph_table import GraphMemory, GraphTable, key_of

log = logging.getLogger(__name__)


_MOST_SIZES = 16
"""A graph is rehearsed for so many sizes; for further ones what it takes follows from the last."""
_MOST_GRAPHS = 64


def with_compiled_memory(table: GraphTable, text: str) -> GraphTable:
    """The table with what its graphs will take.

    Where that cannot be found out it is as the graphs say, which is less certain.

    Args:
        table: of a call.
        text: as its graphs carry it.
    """
    try:
        forward, backward = code_with(text), code_with(key_of(text))
        if forward is not None and backward is not None:
            return _found(table, forward, backward)
    except Exception as error:  # noqa: BLE001 - what PyTorch cannot tell without memory
        kind = type(error).__name__
        log.info("graph %s is not rehearsed: %s: %s", table.graph, kind, error)
    return dataclasses.replace(table, sizes_vary=True)


def _found(table: GraphTable, forward: GeneratedCode, backward: GeneratedCode) -> GraphTable:
    known = _known_of(forward, backward)
    if table.sizes not in known:
        if len(known) >= _MOST_SIZES:
            return _as_if_rehearsed(table, *next(reversed(known.values())))
        known[table.sizes] = table, _rehearsed(table, forward, backward)
    return known[table.sizes][1]


@functools.lru_cache(maxsize=_MOST_GRAPHS)
def _known_of(
    forward: GeneratedCode, backward: GeneratedCode
) -> dict[tuple[int, ...], tuple[GraphTable, GraphTable]]:
    """By sizes, what a pair's graphs and its code say."""
    return {}


def _as_if_rehearsed(table: GraphTable, graphs: GraphTable, code: GraphTable) -> GraphTable:
    """The table at other sizes than those of which the graphs and the code are known."""

    def scaled(memory: GraphMemory, said: GraphMemory, taken: GraphMemory) -> GraphMemory:
        return dataclasses.replace(
            memory,
            workspace_bytes=memory.workspace_bytes
            * taken.workspace_bytes
            // max(1, said.workspace_bytes),
            least_bytes=memory.least_bytes * taken.least_bytes // max(1, said.least_bytes),
        )

    return dataclasses.replace(
        table,
        forward=scaled(table.forward, graphs.forward, code.forward),
        backward=scaled(table.backward, graphs.backward, code.backward),
        backward_of_moving=scaled(
            table.backward_of_moving, graphs.backward_of_moving, code.backward_of_moving
        ),
    )


def _rehearsed(table: GraphTable, forward: GeneratedCode, backward: GeneratedCode) -> GraphTable:
    sizes = forward.named_sizes(table.sizes)
    runs = _all_ways(forward, sizes)
    back = functools.partial(_all_ways, backward, sizes, saved=runs[0].saved)
    return dataclasses.replace(
        table,
        forward=_measured(table.forward, runs),
        backward=_measured(table.backward, back()),
        backward_of_moving=_measured(table.backward_of_moving, back(state_moves=True)),
        is_rehearsed=True,
    )


def _all_ways(*args: Any, **kwargs: Any) -> list[Rehearsal]:  # noqa: ANN401
    """One run, or two if the code goes different ways where a value is true and where it is not."""
    try:
        runs = [rehearse(*args, **kwargs, value=1)]
    except AssertionError:  # it asks whether something is not so, such as a number that is none
        return [rehearse(*args, **kwargs, value=0)]
    if runs[0].asks_for_truth:
        runs.append(rehearse(*args, **kwargs, value=0))
    return runs


def _measured(memory: GraphMemory, runs: Sequence[Rehearsal]) -> GraphMemory:
    ledgers = [run.ledger for run in runs]
    return dataclasses.replace(
        memory,
        workspace_bytes=max(ledger.most_fixed_bytes for ledger in ledgers),
        least_bytes=max(ledger.most_bytes for ledger in ledgers),
        kept_bytes=max(ledger.most_kept_bytes for ledger in ledgers),
    )
