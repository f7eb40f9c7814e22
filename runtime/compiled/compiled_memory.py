"""What a pair of graphs takes that Inductor has compiled, before any of it has run."""

import dataclasses
import functools
import logging

from teraplan.runtime.compiled.generated_code import GeneratedCode, code_with
from teraplan.runtime.compiled.rehearsal import Rehearsal, rehearse
from teraplan.values.graph_table import GraphMemory, GraphTable, key_of

log = logging.getLogger(__name__)


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
            return _rehearsed(table, forward, backward)
    except Exception as error:  # noqa: BLE001 - what PyTorch cannot tell without memory
        log.info("graph %s is not rehearsed: %s", table.graph, error)
    return dataclasses.replace(table, sizes_vary=True)


def _rehearsed(table: GraphTable, forward: GeneratedCode, backward: GeneratedCode) -> GraphTable:
    sizes = forward.named_sizes(table.sizes)
    run = rehearse(forward, sizes)
    back = functools.partial(rehearse, backward, sizes, saved=run.saved)
    return dataclasses.replace(
        table,
        forward=_measured(table.forward, run),
        backward=_measured(table.backward, back()),
        backward_of_moving=_measured(table.backward_of_moving, back(state_moves=True)),
        is_rehearsed=True,
    )


def _measured(memory: GraphMemory, run: Rehearsal) -> GraphMemory:
    return dataclasses.replace(
        memory,
        workspace_bytes=run.ledger.most_fixed_bytes,
        least_bytes=run.ledger.most_bytes,
        kept_bytes=run.ledger.most_kept_bytes,
    )
